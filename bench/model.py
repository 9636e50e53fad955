"""How fast the network is: forward and backward with a LoRA, beside transformers + peft on the same weights and rows.

    python bench/model.py                 # a small Qwen3.5 on the CPU, about a minute
    python bench/model.py --device cuda --dtype bfloat16 --width 2048 --scale 4
    pip install transformers peft         # what it is compared with

The decoder alone is timed: the head is the same product for both. Rows are equally long, or have the length mix of
episodes (log-normal, median 7.4k tokens, at most 32k; divided by --scale): they are padded there and packed here. Only
real tokens count. The two take turns; the figure is the median of the rounds. Seconds are CPU time on the CPU, so that
busy neighbours do not count, and wall time on a GPU.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from model.lora import TARGETS, attach
from model.qwen import ModelConfig, Qwen

LONGEST = 32768


def small_config(width: int) -> ModelConfig:
    """A Qwen3.5 of one block: three delta nets, one attention."""
    kinds = ("linear_attention",) * 3 + ("full_attention",)
    heads = max(2, width // 128)
    delta = dict(linear_num_key_heads=heads // 2, linear_num_value_heads=heads)
    delta |= dict(linear_key_head_dim=64, linear_value_head_dim=64, partial_rotary_factor=0.25, rope_theta=1e7)
    return ModelConfig(1000, width, 3 * width, 4, heads, heads // 2, 64, "qwen3_5_text", layer_types=kinds, **delta)


def mixed_lengths(rows: int, scale: int, seed: int = 0) -> list[int]:
    """Tokens of each row, as episodes have them."""
    normal = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    return (7400 * (0.7 * normal).exp()).clamp(64, LONGEST).div(scale).long().clamp(min=1).tolist()


def packed(lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 1000, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return ids.to(device), torch.tensor([0, *lengths]).cumsum(0).to(device)


def padded(ids: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence(ids.split(lengths), batch_first=True)
    places = torch.arange(rows.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
    return rows, places.long()


def peft_model(model: Qwen, rank: int, dtype: torch.dtype, device: str):
    """The same weights in transformers, with peft's LoRA on the same layers."""
    import peft
    import transformers

    from model.checkpoint import save_folder

    with tempfile.TemporaryDirectory() as folder:
        save_folder(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    return peft.get_peft_model(theirs, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)))


def rate(step, tokens: int, device: str) -> float:
    """Tokens a second of one step."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    began = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return tokens / (clock() - began)


def compare(ours: Qwen, theirs, lengths: list[int], rounds: int, device: str) -> tuple[float, float]:
    """Median tokens a second of both, in turns."""
    ids, cu_seqlens = packed(lengths, device)
    rows, mask = padded(ids, lengths)
    decoder = theirs.get_base_model().model

    def step_ours() -> None:
        ours(ids, cu_seqlens).float().square().mean().backward()

    def step_theirs() -> None:
        hidden = decoder(input_ids=rows, attention_mask=mask, use_cache=False).last_hidden_state
        hidden[mask.bool()].float().square().mean().backward()

    step_ours(), step_theirs()
    rates = [(rate(step_ours, len(ids), device), rate(step_theirs, len(ids), device)) for _ in range(rounds)]
    return tuple(statistics.median(side) for side in zip(*rates, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--scale", type=int, default=32, help="divide real lengths by this")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    ours = Qwen.random(small_config(args.width), dtype=dtype, device=args.device)
    theirs = peft_model(ours, args.rank, dtype, args.device)
    adapter = attach(ours, args.rank, args.rank)
    print(f"{args.device} {args.dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    parameters = sum(p.numel() for p in adapter.parameters())
    print(f"width {args.width}, {parameters:,} adapter parameters; tokens a second")
    mix = mixed_lengths(args.rows, args.scale)
    even = [sum(mix) // len(mix)] * len(mix)
    for name, lengths in (("equal lengths", even), ("length mix", mix)):
        mine, peer = compare(ours, theirs, lengths, args.rounds, args.device)
        shape = f"{len(lengths)} rows of {min(lengths)} to {max(lengths)}"
        print(f"  {name:14} {shape:24} ours {mine:9,.0f}   transformers + peft {peer:9,.0f}   {mine / peer:5.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
