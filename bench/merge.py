"""What merging an adapter into bfloat16 weights costs.

    python bench/merge.py                 # a layer of 1024 x 1024 with rank 16, on the CPU, some seconds

For sizes of B·A relative to W from 1e-5 to 1e-2, three ways to sample with it: the adapter beside W (its factors in
bfloat16), the sum rounded to nearest, and the sum rounded at random. Of the change that the weights then carry:
`cosine` with B·A; `kept`, its projection on B·A (1 is unbiased); `moved`, the share of weights that change at all; and
`output`, ||y - y*|| / ||(B·A) x||: how far the layer's output is from the exact one, as a share of the adapter's own
effect (above 1, doing nothing would be closer).
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from model.lora import Adapter, LowRank, merged
from model.qwen import ModelConfig, Qwen

SIZES = [10.0**e for e in (-5, -4.5, -4, -3.5, -3, -2.5, -2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="inputs and outputs of the layer")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    shape = {"model_type": "qwen3", "vocab_size": 8, "hidden_size": args.size, "intermediate_size": args.size,
             "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    model = Qwen.random(ModelConfig.from_json(shape), 0).bfloat16()
    name = "layers.0.mlp.up_proj"
    weight = model.get_submodule(name).weight.detach()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator) for s in ((args.rank, args.size), (args.size, args.rank)))
    x = torch.randn(256, args.size, generator=generator)
    print("| size of BA / W | way | cosine | kept | output | moved |\n|---|---|---|---|---|---|")
    for size in SIZES:
        scaled = b * (size * weight.float().norm() / (b @ a).norm())
        adapter = Adapter({name: LowRank(a, scaled, 1.0)}, args.rank, args.rank, "model.")
        for way, change in ways(model, adapter, name, weight, a, scaled):
            print(f"| {size:.0e} | {way} | " + " | ".join(f"{v:.3f}" for v in figures(change, scaled @ a, x)) + " |")


def ways(model: Qwen, adapter: Adapter, name: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    """(name, the change that the layer's weights see in fp32) of each way."""
    yield "adapter", b.bfloat16().float() @ a.bfloat16().float()
    for rounding in ("nearest", "stochastic"):
        tensors = dict(merged(model, adapter, torch.bfloat16, rounding, seed=1))
        yield f"merged, {rounding}", tensors[f"model.{name}.weight"].float() - weight.float()


def figures(change: torch.Tensor, exact: torch.Tensor, x: torch.Tensor) -> tuple[float, ...]:
    along = (change * exact).sum() / exact.norm()
    error = (x @ (change - exact).T).norm() / (x @ exact.T).norm()
    return float(along / change.norm()), float(along / exact.norm()), float(error), float((change != 0).float().mean())


if __name__ == "__main__":
    main()
