"""GRPO as pure functions of tensors: advantages, the clipped token loss, importance weights and the figures to log.

Nothing here knows of models, episodes or optimizers. Sources: GRPO (Shao et al. 2024, arXiv 2402.03300), clip-higher
and the token mean (DAPO, arXiv 2503.14476), the dual clip (Ye et al. 2020, arXiv 1912.09729), the constant divisor
(Dr. GRPO, arXiv 2503.20783), truncated importance weights (Ionides 2008).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STD = ("group", "none")
AGGREGATIONS = ("token", "sequence", "constant")
EPS = 1e-6  # added to the group's standard deviation
MAX_LOG_RATIO = 20.0  # e^20 is far beyond every clip: a wild token then makes a large number, not an infinite one


def advantages(rewards: Sequence[float] | Tensor, std: str = "group") -> Tensor:
    """Advantages [n] (float64) of one group's rewards [n]: reward - mean, over (unbiased std + 1e-6) if std="group".

    Equal rewards, and a group of one, give exactly 0. ValueError for an unknown `std`.
    """
    if std not in STD:
        raise ValueError(f"std is {std!r}; it must be one of {', '.join(STD)}")
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.numel() < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred if std == "none" else centred / (rewards.std() + EPS)


def token_loss(
    new: Tensor,
    old: Tensor,
    advantage: Tensor | float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Loss of each token, unreduced and unmasked, the shape of `new`; `advantage` broadcasts against it.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(new - old). With `dual_clip` c, tokens of negative
    advantage lose at most -c A, however likely the new policy has made them.
    """
    advantage = torch.as_tensor(advantage, dtype=new.dtype, device=new.device)
    ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return loss


def importance_weights(old: Tensor, sampler: Tensor, cap: float | None) -> Tensor:
    """exp(old - sampler) per token, detached, cut at `cap` from above; all ones if `cap` is None (no correction).

    Per token on purpose: products over an episode of thousands of tokens collapse to zero.
    """
    if cap is None:
        return torch.ones_like(old)
    return (old - sampler).detach().exp().clamp(max=cap)


def token_weights(counts: Sequence[int], aggregation: str = "token", max_tokens: int = 1) -> list[float]:
    """What one token of each episode weighs in the loss, from the masked tokens `counts` of a whole optimizer batch.

    "token": 1 / all masked tokens. "sequence": the mean over episodes of each one's token mean. "constant": tokens are
    summed and divided by episodes x `max_tokens`. Episodes without masked tokens count for nothing. Computed once an
    optimizer batch, so that micro-batches only add up. ValueError for an unknown `aggregation`.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"loss_aggregation is {aggregation!r}; it must be one of {', '.join(AGGREGATIONS)}")
    tokens, episodes = sum(counts), sum(count > 0 for count in counts)
    if aggregation == "token":
        return [1 / tokens if count else 0.0 for count in counts]
    if aggregation == "sequence":
        return [1 / (episodes * count) if count else 0.0 for count in counts]
    return [1 / (episodes * max_tokens) if count else 0.0 for count in counts]


def mismatch(new: Tensor, sampler: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs of some tokens are from the sampler's, with d = new - sampler.

    "mean" and "max" of |d|, and "k3", the mean of exp(d) - 1 - d: an unbiased, never negative estimate of
    KL(sampler || trainer) (Schulman 2020, "Approximating KL divergence"). All 0 without tokens.
    """
    d = (new.double() - sampler.double()).detach()
    if d.numel() == 0:
        return {"mean": 0.0, "max": 0.0, "k3": 0.0}
    return {"mean": float(d.abs().mean()), "max": float(d.abs().max()), "k3": float((torch.expm1(d) - d).mean())}


def clip_fractions(
    new: Tensor, old: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> dict[str, float]:
    """Shares of the tokens whose gradient each clip has cut: "clip_low", "clip_high", "dual_clip"."""
    ratio = (new - old).detach().exp()
    touched = {
        "clip_low": (advantage < 0) & (ratio < 1 - clip_low),
        "clip_high": (advantage > 0) & (ratio > 1 + clip_high),
        "dual_clip": (advantage < 0) & (ratio > (float("inf") if dual_clip is None else dual_clip)),
    }
    return {name: float(tokens.double().mean()) for name, tokens in touched.items()}
