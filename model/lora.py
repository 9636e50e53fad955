"""Low-rank adapters by hand (Hu et al. 2021): y = x W^T + alpha/rank (x A^T) B^T, W frozen, A and B in float32."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.qwen import Linear, Qwen

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
TARGETS = ATTENTION + MLP + DELTA_NET


def check_targets(targets: Sequence[str]) -> None:
    """ValueError for kinds of layers that do not exist, and for the choice that vLLM's adapters cannot take."""
    unknown = [kind for kind in targets if kind not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"LoRA targets: {', '.join(unknown) or 'none given'}; known are {', '.join(TARGETS)}")
    if "in_proj_z" in targets and "in_proj_qkv" not in targets:
        raise ValueError("LoRA targets: in_proj_z needs in_proj_qkv beside it, as vLLM computes the two as one")


class LowRank:
    """The low-rank term of one linear layer. `a` [rank, in] and `b` [out, rank] are the float32 masters."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float):
        self.a, self.b, self.scale = a, b, scale

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """y + scale (x A^T) B^T, computed in x's dtype and on its device."""
        return torch.add(y, F.linear(F.linear(x, self.a.to(x)), self.b.to(x)), alpha=self.scale)


class Adapter:
    """The low-rank terms of a model by module name ("layers.0.self_attn.q_proj"), in the model's order. `prefix`:
    what Hugging Face checkpoints put before these names."""

    def __init__(self, terms: dict[str, LowRank], rank: int, alpha: float, prefix: str):
        self.terms, self.rank, self.alpha, self.prefix = terms, rank, alpha, prefix

    def parameters(self) -> list[nn.Parameter]:
        return [p for term in self.terms.values() for p in (term.a, term.b)]

    def tensors(self) -> dict[str, Tensor]:
        """The masters themselves, detached: "<module>.lora_A.weight" and "<module>.lora_B.weight"."""
        named = ((name, part, p) for name, t in self.terms.items() for part, p in (("A", t.a), ("B", t.b)))
        return {f"{name}.lora_{part}.weight": p.detach() for name, part, p in named}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the masters in place. ValueError if a name or a shape differs; then nothing is changed."""
        own = self.tensors()
        for name in sorted(own.keys() ^ tensors.keys()):
            raise ValueError(f"adapter tensor {name} is {'missing' if name in own else 'unexpected'}")
        for name, mine in own.items():
            if mine.shape != tensors[name].shape:
                raise ValueError(f"adapter tensor {name} has shape {list(tensors[name].shape)}, not {list(mine.shape)}")
        for name, mine in own.items():
            mine.copy_(tensors[name])


def attach(model: Qwen, rank: int, alpha: float, targets: Sequence[str] = TARGETS, seed: int = 0) -> Adapter:
    """Freeze the model and give each linear layer whose last name is in `targets` a low-rank term; kinds that the model
    lacks are passed over. A starts uniform in +-1/sqrt(in) and B at zero, so that nothing changes at first."""
    check_targets(targets)
    if rank < 1:
        raise ValueError(f"LoRA rank must be at least 1, not {rank}")
    chosen = [(n, m) for n, m in model.named_modules() if isinstance(m, Linear) and n.rpartition(".")[2] in targets]
    if not chosen:
        raise ValueError(f"LoRA targets: this model has no layer named {', '.join(targets)}")
    model.requires_grad_(False)
    generator, terms = torch.Generator().manual_seed(seed), {}
    for name, module in chosen:
        (outputs, inputs), device = module.weight.shape, module.weight.device
        a = torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)
        a, b = nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(outputs, rank, device=device))
        terms[name] = module.lora = LowRank(a, b, alpha / rank)
    return Adapter(terms, rank, alpha, model.config.prefix)


def round_randomly(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down at random with mean x: a bfloat16 is the upper half of a float32's bits."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    return ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


@torch.no_grad()
def merged(
    model: Qwen, adapter: Adapter | None, dtype: torch.dtype, rounding: str = "nearest", seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model with the adapter added in, one at a time: (Hugging Face name, fresh tensor of `dtype`).

    The sum is taken in float32. rounding "stochastic" (to bfloat16 only) keeps a small delta on average, of which
    "nearest" loses most. Tensors without a low-rank term are only converted."""
    if rounding not in ("nearest", "stochastic") or (rounding == "stochastic" and dtype != torch.bfloat16):
        raise ValueError(f"rounding {rounding!r} to {dtype}: choose nearest, or stochastic to torch.bfloat16")
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed)
    for name, p in model.named_parameters():
        term = adapter.terms.get(name.removesuffix(".weight")) if adapter else None
        if term is None:
            yield model.config.full_name(name), p.to(p.dtype if name.endswith("A_log") else dtype, copy=True)
            continue
        total = torch.addmm(p.float(), term.b.to(p.device), term.a.to(p.device), alpha=term.scale)
        rounded = round_randomly(total, generator) if rounding == "stochastic" else total.to(dtype)
        yield model.config.full_name(name), rounded
