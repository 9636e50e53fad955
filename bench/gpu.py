"""One training step of a 9B-shaped model on a GPU: peak memory against the plan, tokens a second, share of the peak.

    python bench/gpu.py                         # 32,768 tokens in one row, LoRA of rank 64; needs some 45 GiB
    python bench/gpu.py --lengths 8192,12288,4096,8192
    python bench/gpu.py --small                 # a tiny model, also on a CPU: does it run?

Weights are random: speed does not depend on them. First each fast kernel that is installed is checked against plain
torch, forward and backward. torch 2.11 or later is enough; flash-attn and flash-linear-attention are used if present.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from model import budget, ops
from model.logprobs import token_logprobs
from model.lora import TARGETS, attach
from model.ops import Rows
from model.qwen import ModelConfig, Qwen, unit

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


def step(config: ModelConfig, lengths: list[int], rank: int, device: str, rounds: int) -> None:
    """Time the recompute of old log-probs (forward) and the update (forward and backward, with layer checkpoints) of
    one micro-batch."""
    tokens, chunk = sum(lengths), 1024  # as in configs/l8.py
    model = Qwen.random(config, dtype=torch.bfloat16, device=device)
    torch.nn.init.normal_(model.lm_head.weight, std=0.02)
    adapter = attach(model, rank, rank)
    model.gradient_checkpointing = True
    ids = torch.randint(0, config.vocab_size, (tokens,), device=device)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)

    def forward() -> Tensor:
        return token_logprobs(model(ids, cu_seqlens), model.head_weight, ids.roll(-1), chunk)[0]

    def update() -> None:
        forward().mean().backward()

    kernel = device == "cuda" and ops.installed("fla")
    phases = budget.plan(config, rank, TARGETS, tokens, chunk, kernel=kernel)
    work = budget.forward_flops(config, lengths, tokens)
    for name, call, useful, hardware in (("recompute", torch.no_grad()(forward), 1, 1), ("update", update, 2, 3)):
        call()  # compiles kernels, fills the allocator's pools
        seconds, peak = min(timed(call, device) for _ in range(rounds))
        planned = sum(size for item, size in phases[name].items() if item not in ("free", "CUDA context"))
        share = work / seconds / PEAK_TFLOPS / 1e12
        print(f"  {name:16} {seconds:8.2f} s   {tokens / seconds:9,.0f} tokens a second")
        if device == "cuda":
            print(f"  {'':16} peak memory {peak / budget.GIB:.1f} GiB, planned {planned / budget.GIB:.1f} GiB")
            print(f"  {'':16} {useful * share:.0%} of {PEAK_TFLOPS} TFLOP/s, {hardware * share:.0%} with recomputation")
    print(f"  {sum(p.numel() for p in adapter.parameters()):,} adapter parameters, all with gradients: "
          f"{all(p.grad is not None for p in adapter.parameters())}")  # fmt: skip


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
    lengths = [130, 1, 169] if args.small else [int(n) for n in args.lengths.split(",")]
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{where}, torch {torch.__version__}\nkernels against plain torch:")
    good = check_kernels(device, [70, 1, 200])
    print(f"{'tiny' if args.small else '9B'} model, {sum(lengths):,} tokens in {len(lengths)} rows, LoRA {args.rank}:")
    step(SMALL if args.small else QWEN_9B, lengths, args.rank, device, args.rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
