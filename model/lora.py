"""Low-rank adapters (Hu et al. 2021) by hand: y = x W^T + alpha/rank (x A^T) B^T, with W frozen and A, B kept in float32."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.qwen import Linear, Qwen

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)


def check_targets(targets: tuple[str, ...] | list[str]) -> None:
    """ValueError for kinds that do not exist, and for the set that vLLM's adapters cannot take."""
    unknown = [kind for kind in targets if kind not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"LoRA targets {', '.join(unknown) or '(none)'} are not known; choose from {', '.join(TARGETS)}")
    if "in_proj_z" in targets and "in_proj_qkv" not in targets:
        raise ValueError("LoRA target in_proj_z needs in_proj_qkv beside it (vLLM fuses the two)")


class LowRank:
    """The low-rank term of one linear layer. `a` [rank, in] and `b` [out, rank] are the float32 masters."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float):
        self.a, self.b, self.scale, self.enabled = a, b, scale, True

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """y + scale (x A^T) B^T, computed in x's dtype."""
        if not self.enabled:
            return y
        return torch.add(y, F.linear(F.linear(x, self.a.to(x)), self.b.to(x)), alpha=self.scale)


class Adapter:
    """All low-rank terms of a model, by module name ("layers.0.self_attn.q_proj"), in the model's order."""

    def __init__(self, terms: dict[str, LowRank], rank: int, alpha: float, targets: tuple[str, ...]):
        self.terms, self.rank, self.alpha, self.targets = terms, rank, alpha, targets

    def parameters(self) -> list[nn.Parameter]:
        return [p for term in self.terms.values() for p in (term.a, term.b)]

    def tensors(self) -> dict[str, Tensor]:
        """The masters themselves, detached, as "<module>.lora_A.weight" and "<module>.lora_B.weight"."""
        named = ((name, part, p) for name, t in self.terms.items() for part, p in (("A", t.a), ("B", t.b)))
        return {f"{name}.lora_{part}.weight": p.detach() for name, part, p in named}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the masters. ValueError if a name or a shape differs."""
        own = self.tensors()
        for name in sorted(own.keys() ^ tensors.keys()):
            raise ValueError(f"adapter tensor {name} is {'missing' if name in own else 'unexpected'}")
        for name, mine in own.items():
            if mine.shape != tensors[name].shape:
                raise ValueError(f"adapter tensor {name} has shape {list(tensors[name].shape)}, not {list(mine.shape)}")
            mine.copy_(tensors[name])

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within, the model computes what its base computes."""
        for term in self.terms.values():
            term.enabled = False
        try:
            yield
        finally:
            for term in self.terms.values():
                term.enabled = True


def attach(model: Qwen, rank: int, alpha: float, targets: tuple[str, ...] = TARGETS, seed: int = 0) -> Adapter:
    """Freeze the model and add a low-rank term to each linear layer whose last name is in `targets` (kinds that the model lacks
    are passed over). A starts uniform in +-1/sqrt(in), B at zero, so that the start changes nothing; on the weights' device."""
    check_targets(targets)
    if rank < 1:
        raise ValueError(f"LoRA rank must be at least 1, not {rank}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    terms = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.rsplit(".")[-1] in targets:
            outputs, inputs = module.weight.shape
            a = torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)
            device = module.weight.device
            a, b = nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(outputs, rank, device=device))
            terms[name] = module.lora = LowRank(a, b, alpha / rank)
    if not terms:
        raise ValueError(f"LoRA targets {', '.join(targets)} name no layer of this model")
    return Adapter(terms, rank, alpha, tuple(targets))


def round_randomly(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down at random such that the mean is x: a bfloat16 is the upper half of a float32's bits."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


def merged(
    model: Qwen, adapter: Adapter, dtype: torch.dtype, rounding: str = "nearest", seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model with the adapter added in, one at a time: (Hugging Face name, fresh tensor of `dtype`).

    The sum is taken in float32. rounding "stochastic" (bfloat16 only) keeps small changes on average where "nearest" loses most.
    Layers without a low-rank term are only converted."""
    if rounding not in ("nearest", "stochastic") or (rounding == "stochastic" and dtype != torch.bfloat16):
        raise ValueError(f"rounding {rounding!r} to {dtype} is not known; choose nearest, or stochastic with torch.bfloat16")
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, p in model.named_parameters():
        term = adapter.terms.get(name.removesuffix(".weight"))
        if term is None:
            yield model.config.prefix * (name != "lm_head.weight") + name, p.detach().to(dtype, copy=True)
            continue
        with torch.no_grad():
            total = torch.addmm(p.float(), term.b.to(p.device), term.a.to(p.device), alpha=term.scale)
        fresh = round_randomly(total, generator) if rounding == "stochastic" else total.to(dtype)
        yield model.config.prefix + name, fresh
