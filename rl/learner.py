"""The learner: from token lists to one optimizer step, the same way for imitation (SFT) and for GRPO.

A batch is a list of episodes, played or demonstrated: what is masked is learnt. They are packed into micro-batches of
at most config.micro_tokens, which only bounds memory: every token's weight in the loss is fixed before the first
micro-batch, so the gradient does not depend on how the batch was cut.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from model.logprobs import token_logprobs
from rl import dist
from rl.episode import Episode
from rl.grpo import clip_fractions, importance_weights, mismatch, token_loss, token_weights


@dataclass
class Pack:
    """One micro-batch: some episodes of a batch, end to end."""

    members: list[int]  # their places in the batch
    ids: Tensor  # [T]
    cu_seqlens: Tensor  # [n+1] int32
    sources: Tensor  # [M]: positions whose hidden state predicts a masked token
    targets: Tensor  # [M]: those tokens
    counts: list[int]  # [n]: masked tokens of each member

    def spread(self, values: Sequence[float]) -> Tensor:
        """One number per episode of the batch -> fp32 [M], each member's repeated for its masked tokens."""
        own = torch.tensor([values[i] for i in self.members], dtype=torch.float32)
        return own.repeat_interleave(torch.tensor(self.counts)).to(self.ids.device)


def plan(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Micro-batches of at most `micro_tokens` from episodes of these lengths, longest first: neighbours are alike.

    Deterministic. An episode that is longer than a micro-batch runs alone.
    """
    bins, room = [], -1
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            bins.append([])
            room = micro_tokens
        bins[-1].append(i)
        room -= lengths[i]
    return bins


def pack(episodes: Sequence[Episode], members: list[int], device: torch.device) -> Pack:
    """Lay the `members` of a batch end to end."""
    masks = [np.array(episodes[i].mask, dtype=bool) for i in members]
    if any(mask[0] for mask in masks):
        raise ValueError("mask[0] is 1, but nothing comes before an episode's first token to predict it from")
    ids = torch.from_numpy(np.concatenate([np.array(episodes[i].ids, dtype=np.int64) for i in members]))
    places = torch.from_numpy(np.flatnonzero(np.concatenate(masks)))
    starts = torch.from_numpy(np.cumsum([0] + [len(mask) for mask in masks], dtype=np.int32))
    tensors = [t.to(device) for t in (ids, starts, places - 1, ids[places])]
    return Pack(members, *tensors, [int(mask.sum()) for mask in masks])


class Learner:
    """Owns the update of `params` (fp32; of a full model or of an adapter) by `optimizer`. It never changes the rate.

    `config` gives micro_tokens, head_chunk, temperature, grad_clip and the settings of the GRPO loss; `n_vocab` is the
    tokenizer's size where the head has padding rows beyond it.
    """

    def __init__(self, model, params: list[Tensor], optimizer, config, device="cpu", n_vocab: int | None = None):
        self.model, self.params, self.optimizer, self.config = model, list(params), optimizer, config
        self.device, self.n_vocab = torch.device(device), n_vocab

    def sft_step(self, batch: Sequence[Episode]) -> dict[str, float]:
        """One step of imitation: loss is the mean of -log p over the batch's masked tokens. Returns what to log."""
        counts = [sum(episode.mask) for episode in batch]
        tokens = sum(counts)
        loss_sum = entropy_sum = 0.0
        for micro in self._packs(batch, [i for i, count in enumerate(counts) if count]):
            logp, entropy = self._forward(micro)
            loss = -logp.sum() / tokens
            loss.backward()
            loss_sum += float(loss.detach())
            entropy_sum += float(entropy.sum())
        loss_sum, entropy_sum = map(sum, zip(*dist.gather([(loss_sum, entropy_sum)]), strict=True))
        stats = {"loss": loss_sum, "entropy": entropy_sum / max(tokens, 1), "tokens": tokens}
        return stats | self._step(tokens > 0)

    def old_logprobs(
        self, episodes: Sequence[Episode], advantages: Sequence[float] | None = None
    ) -> list[Tensor | None]:
        """The model's log-probs of each episode's masked tokens before the update: fp32 [masked tokens] on the CPU.

        With `advantages`, only what grpo_step will run is computed (None for the rest), in the very micro-batches that
        it will use, so that the first ratio is 1 and not 1 give or take another shape's rounding. With several ranks,
        each has those of its own micro-batches.
        """
        old: list[Tensor | None] = [None] * len(episodes)
        members = range(len(episodes)) if advantages is None else self.live(episodes, advantages)
        with torch.no_grad():
            for micro in self._packs(episodes, list(members)):
                logp, _ = self._forward(micro)
                for i, part in zip(micro.members, logp.cpu().split(micro.counts), strict=True):
                    old[i] = part
        return old

    def grpo_step(
        self, episodes: Sequence[Episode], advantages: Sequence[float], old: Sequence[Tensor | None] | None,
        first: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer batch of GRPO. `advantages` has one number an episode; `old` comes from old_logprobs() or
        sampler_logprobs(), or is None if nothing was updated since sampling: the policy is then its own old one, and
        the ratio 1. `first` says that nothing was (what is computed here is then the sampled policy, for "mismatch").

        The denominator counts every episode; those with advantage 0 add nothing to the loss and are not run through the
        model. If none is left there is no optimizer step (momentum alone would move the weights): "skipped" is 1.
        Returns what to log; figures other than tokens and loss cover live episodes.
        """
        counts = [sum(e.mask) if self._kept(e) else 0 for e in episodes]
        weights = token_weights(counts, self.config.loss_aggregation, self.config.max_tokens)
        live = self.live(episodes, advantages)
        stats = {"tokens": sum(counts), "live_tokens": sum(counts[i] for i in live), "live_episodes": len(live)}
        parts = [self._grpo_micro(micro, episodes, advantages, old, weights) for micro in self._packs(episodes, live)]
        if parts := dist.gather(parts):
            columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            stats |= self._figures(columns, first) | entropy_by_level(episodes, columns)
        return stats | self._step(bool(live))

    def _grpo_micro(self, micro: Pack, episodes, advantages, old, weights) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch; what the figures need of each of its tokens, [M] on the CPU."""
        c = self.config
        new, entropy = self._forward(micro)
        before = new.detach() if old is None else torch.cat([old[i] for i in micro.members]).to(new.device)
        sampler = torch.cat(sampler_logprobs([episodes[i] for i in micro.members])).to(new.device)
        advantage = micro.spread(advantages)
        loss = token_loss(new, before, advantage, c.clip_low, c.clip_high, c.dual_clip)
        loss = loss * importance_weights(before, sampler, c.importance_cap) * micro.spread(weights)
        loss.sum().backward()
        columns = {"loss": loss, "new": new, "old": before, "sampler": sampler, "advantage": advantage}
        columns |= {"entropy": entropy, "episode": micro.spread(range(len(episodes)))}
        return {name: column.detach().cpu() for name, column in columns.items()}

    def _figures(self, columns: dict[str, Tensor], first: bool) -> dict[str, float]:
        """What to log of one optimizer batch from its live tokens' numbers."""
        c = self.config
        new, old, sampler = columns["new"], columns["old"], columns["sampler"]
        ratio = (new - old).double().exp()
        weight = importance_weights(old, sampler, c.importance_cap).double()
        uncut = importance_weights(old, sampler, None if c.importance_cap is None else math.inf)
        own = new if first else old  # the trainer's log-probs of the policy that was sampled from
        known = first or c.old_logprobs != "sampler"
        return {
            "loss": float(columns["loss"].double().sum()),
            "entropy": float(columns["entropy"].double().mean()),
            "ratio_mean": float(ratio.mean()),
            "ratio_max": float(ratio.max()),
            **clip_fractions(new, old, columns["advantage"], c.clip_low, c.clip_high, c.dual_clip),
            "importance_mean": float(weight.mean()),
            "importance_cut": float((weight < uncut).double().mean()),
            **({f"mismatch_{name}": value for name, value in mismatch(own, sampler).items()} if known else {}),
        }

    def _kept(self, episode: Episode) -> bool:
        return not (self.config.mask_truncated and episode.truncated)

    def live(self, episodes: Sequence[Episode], advantages: Sequence[float]) -> list[int]:
        """The episodes that can move the weights."""
        return [i for i, e in enumerate(episodes) if advantages[i] != 0 and self._kept(e) and any(e.mask)]

    def _packs(self, episodes: Sequence[Episode], chosen: list[int]) -> Iterator[Pack]:
        bins = plan([len(episodes[i].ids) for i in chosen], self.config.micro_tokens)
        for bin_ in bins[dist.rank()::dist.ranks()]:
            yield pack(episodes, [chosen[j] for j in bin_], self.device)

    def _forward(self, micro: Pack) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy [M] of the masked tokens; the head sees only the positions that predict one."""
        hidden = self.model(micro.ids, micro.cu_seqlens).index_select(0, micro.sources)
        c = self.config
        return token_logprobs(
            hidden, self.model.head_weight, micro.targets, c.head_chunk, n_vocab=self.n_vocab, temperature=c.temperature
        )

    def _step(self, anything: bool) -> dict[str, float]:
        """Clip and step, unless there is nothing to learn from or the gradient is not finite (it would ruin all)."""
        stats = {"grad_norm": 0.0, "steps": 0, "skipped": 0, "nonfinite": 0}
        if not anything:
            return stats | {"skipped": 1}
        dist.sum_gradients(self.params)
        stats["grad_norm"] = float(clip_grad_norm_(self.params, self.config.grad_clip))
        if math.isfinite(stats["grad_norm"]):
            self.optimizer.step()
            stats["steps"] = 1
        else:
            stats["nonfinite"] = 1
        self.optimizer.zero_grad()
        return stats


def sampler_logprobs(episodes: Sequence[Episode]) -> list[Tensor]:
    """The sampler's log-probs of each episode's masked tokens: fp32 [masked tokens] on the CPU."""
    return [torch.tensor(e.logprobs, dtype=torch.float32)[torch.tensor(e.mask, dtype=torch.bool)] for e in episodes]


def entropy_by_level(episodes: Sequence[Episode], columns: dict[str, Tensor]) -> dict[str, float]:
    """Mean entropy of the sampled tokens of each level's live episodes: "entropy_L8" and so on."""
    levels = [e.task.level for e in episodes]
    figures = {}
    for level in sorted({level for level in levels if level is not None}):
        chosen = torch.tensor([own == level for own in levels])[columns["episode"].long()]
        if chosen.any():
            figures[f"entropy_{level}"] = float(columns["entropy"][chosen].double().mean())
    return figures
