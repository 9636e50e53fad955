"""The trainer's phases on a 9B-shaped model on a GPU: memory against the plan, tokens a second, share of the peak.

    python bench/gpu.py                         # 32,768 tokens, LoRA 64; needs 45 GiB, and 24 of main memory; minutes
    python bench/gpu.py --lengths 8192,12288,4096,8192
    python bench/gpu.py --small                 # a tiny model, also on a CPU, in ten seconds: does it run?

Weights are random: speed does not depend on them. First each fast kernel that is installed is checked against plain
torch, forward and backward. Then come the phases of a GRPO step but for sampling, by the trainer's own code: the frozen
weights return from (pinned) main memory; old log-probs are computed; the adapter is updated; the weights leave; what
the sampler gets is made, for both ways of syncing. torch 2.11 or later, numpy and tqdm are enough; flash-attn,
flash-linear-attention and safetensors (to write the adapter) are used if present.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from model import budget, ops
from model.lora import TARGETS, attach, merged
from model.ops import Rows
from model.optim import AdamW, Weights
from model.qwen import ModelConfig, Qwen, unit
from rl.config import Config
from rl.episode import Episode
from rl.learner import Learner

QWEN_9B = ModelConfig(
    *(248320, 4096, 12288, 32, 16, 4, 256),
    model_type="qwen3_5_text",
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 8,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
SMALL = replace(
    QWEN_9B, vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, head_dim=16,
    layer_types=QWEN_9B.layer_types[:4], linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip
PEAK_TFLOPS = 989  # dense bf16 of an H100 or H200 SXM, by the datasheet
CHUNK = 1024  # of the head, as in configs/l8.py
PASSES = {"recompute": (1, 1), "update": (2, 3)}  # forward passes' worth of work, useful and with layer checkpoints


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def with_gradients(call, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """The result of call(*inputs) and the gradients of its product with `weight`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad((out.float() * weight).sum(), inputs)]


def report(name: str, fast: list[Tensor], plain: list[Tensor]) -> bool:
    errors = [relative(a, b) for a, b in zip(fast, plain, strict=True)]
    good = max(errors) < 0.02
    print(f"  {name:32} forward {errors[0]:.1e}   gradients {max(errors[1:]):.1e}   {'ok' if good else 'WRONG'}")
    return good


def check_kernels(device: str, lengths: list[int]) -> bool:
    """What this machine uses in bfloat16 against plain torch in float32 on the same rounded inputs."""
    rows, total, good = Rows(lengths, device), sum(lengths), True
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(total, *shape, device=device, generator=generator).bfloat16()

    name = "flash-attn" if ops.installed("flash_attn") else "torch's varlen attention"
    name = name if device == "cuda" else "scaled_dot_product_attention"
    q, k, v, weight = normal(16, 256), normal(4, 256), normal(4, 256), normal(16, 256).float()
    fast = with_gradients(lambda *x: ops.attention(*x, rows), [q, k, v], weight)
    plain = with_gradients(lambda *x: ops.attention(*x, rows), [q.float(), k.float(), v.float()], weight)
    good &= report(name, fast, plain)

    fused = device == "cuda" and ops.installed("fla")
    q, k, v, weight = unit(normal(8, 128).float()), unit(normal(8, 128).float()), normal(8, 128), normal(8, 128).float()
    g, beta, state = -normal(8).float().square(), normal(8).float().sigmoid(), torch.zeros(len(lengths), 8, 128, 128)
    inputs, state = [q, k, v, g, beta], state.to(device)
    fast = with_gradients(lambda *x: ops.delta_rule(*x, rows)[0], inputs, weight)
    plain = with_gradients(lambda *x: token_by_token(*x, rows, state), [x.double() for x in inputs], weight.double())
    return good & report("flash-linear-attention" if fused else "chunked delta rule", fast, plain)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, state: Tensor) -> Tensor:
    """The delta rule as it is defined."""
    out = []
    for token, (row, offset) in enumerate(zip(rows.row.tolist(), rows.offset.tolist(), strict=True)):
        if offset == 0:
            s = state[row].double()
        s = s * g[token].exp()[:, None, None]
        error = beta[token, :, None] * (v[token] - torch.einsum("hkv,hk->hv", s, k[token]))
        s = s + torch.einsum("hk,hv->hkv", k[token], error)
        out.append(torch.einsum("hkv,hk->hv", s, q[token]) * q.shape[-1] ** -0.5)
    return torch.stack(out)


def timed(call, device: str) -> tuple[float, int]:
    """Seconds and peak bytes of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() if device == "cuda" else 0


class Trainer:
    """What train.py has of a step between two samplings, with one micro-batch of random episodes."""

    def __init__(self, config: ModelConfig, lengths: list[int], rank: int, device: str):
        self.model = Qwen.random(config, dtype=torch.bfloat16, device=device)
        torch.nn.init.normal_(self.model.lm_head.weight, std=0.02)
        self.model.gradient_checkpointing = True
        self.adapter = attach(self.model, rank, rank)
        self.weights = Weights(self.model, self.adapter.parameters(), device)
        self.weights.release()
        # Its defaults, not a Config: that would look for the task world, and so for packages that are not needed here
        settings = {field.name: field.default for field in fields(Config)} | {"micro_tokens": sum(lengths)}
        settings = SimpleNamespace(**settings | {"head_chunk": CHUNK})
        optimizer = AdamW(self.adapter.parameters(), settings.lr)
        self.learner = Learner(self.model, self.adapter.parameters(), optimizer, settings, device)
        self.episodes = [Episode(SimpleNamespace(level=None), seed=0) for _ in lengths]
        for episode, n in zip(self.episodes, lengths, strict=True):
            ids = torch.randint(0, config.vocab_size, (n,)).tolist()
            episode.append(ids[:1])
            episode.append(ids[1:], [-12.4] * (n - 1))
        self.gains = [1.0] * len(lengths)
        self.stats = {}

    def recompute(self) -> None:
        self.old = self.learner.old_logprobs(self.episodes, self.gains)

    def update(self) -> None:
        self.stats = self.learner.grpo_step(self.episodes, self.gains, self.old)

    def merge(self) -> None:
        deque(merged(self.model, self.adapter, torch.bfloat16), maxlen=0)

    def write_adapter(self) -> None:
        from model.checkpoint import save_adapter

        with tempfile.TemporaryDirectory() as folder:
            save_adapter(self.adapter, folder, "", torch.bfloat16)

    def phases(self) -> dict:
        """In the order of a step; plan names are those of model/budget.py."""
        calls = {"return": self.weights.upload, "recompute": self.recompute, "update": self.update,
                 "offload": self.weights.release, "sync, merged": self.merge}  # fmt: skip
        return calls | ({"sync, adapter": self.write_adapter} if ops.installed("safetensors") else {})


def step(config: ModelConfig, lengths: list[int], rank: int, device: str, rounds: int) -> bool:
    """Time the phases and hold their memory against the plan. False if the update was none."""
    tokens, trainer, best = sum(lengths), Trainer(config, lengths, rank, device), {}
    for i in range(rounds + 1):  # the first round compiles kernels and fills the allocator's pools
        for name, call in trainer.phases().items():
            taken = timed(call, device)
            best[name] = min(taken, best[name]) if i > 1 else taken
    kernel = device == "cuda" and ops.installed("fla")
    plan = budget.plan(config, rank, TARGETS, tokens, CHUNK, kernel=kernel)
    plan["return"] = {item: plan["update"][item] for item in ("frozen weights", "adapter, fp32")}
    work = budget.forward_flops(config, lengths, tokens - len(lengths))
    moved = sum(plan["return"].values())
    for name, (seconds, peak) in best.items():
        rate = f"{tokens / seconds:,.0f} tokens a second" if name in PASSES else ""
        if device == "cuda" and name == "return":  # on the CPU nothing moves
            rate = f"{moved / seconds / 1e9:.1f} GB/s"
        print(f"  {name:16} {seconds:8.3f} s   {rate}".rstrip())
        if device == "cuda" and name in plan:
            planned = sum(size for item, size in plan[name].items() if item not in ("free", "CUDA context"))
            print(f"  {'':16} peak memory {peak / budget.GIB:.1f} GiB, planned {planned / budget.GIB:.1f} GiB")
        if device == "cuda" and name in PASSES:
            useful, hardware = (passes * work / seconds / PEAK_TFLOPS / 1e12 for passes in PASSES[name])
            print(f"  {'':16} {useful:.0%} of {PEAK_TFLOPS} TFLOP/s, {hardware:.0%} with recomputation")
    if device == "cuda":
        left = torch.cuda.memory_allocated()
        print(f"  left on the card after the offload: {left / budget.GIB:.2f} GiB")
    parameters = sum(p.numel() for p in trainer.adapter.parameters())
    print(f"  {parameters:,} adapter parameters, updated: {trainer.stats['steps'] == 1}; the first ratio is 1 within "
          f"{abs(trainer.stats['ratio_max'] - 1):.1e}")  # fmt: skip
    return trainer.stats["steps"] == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768", help="tokens of each row of the micro-batch, comma between")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a tiny model and 300 tokens")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.small:
        print("bench/gpu.py: this machine has no CUDA device; --small runs a tiny model on the CPU", file=sys.stderr)
        return 2
    lengths = [130, 2, 168] if args.small else [int(n) for n in args.lengths.split(",")]
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{where}, torch {torch.__version__}\nkernels against plain torch:")
    good = check_kernels(device, [70, 1, 200])
    print(f"{'tiny' if args.small else '9B'} model, {sum(lengths):,} tokens in {len(lengths)} rows, LoRA {args.rank}:")
    good &= step(SMALL if args.small else QWEN_9B, lengths, args.rank, device, args.rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
