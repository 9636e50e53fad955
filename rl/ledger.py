"""Bookkeeping for people who pay: tokens, model FLOPs and their share of the cards' peak, hours and money of a run."""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from model import budget, ops
from model.qwen import ModelConfig
from rl import dist
from rl.config import Config
from rl.episode import Episode
from rl.run import read_json, write_json


def flops(shape: ModelConfig, episodes: Sequence[Episode], live: Sequence[Sequence[Episode]], old_logprobs: str
          ) -> dict[str, int]:
    """Useful FLOPs of a step's phases, by model/budget.py; `live`: what each optimizer batch runs through the model.

    Sampling is one forward pass over each episode's tokens (what is read again counts as waste), old log-probs are one
    of the batches that the setting `old_logprobs` says, an update is two: forward, and backward without gradients of
    the frozen weights.
    """
    def forward(items: Sequence[Episode]) -> int:
        return budget.forward_flops(shape, [len(e.ids) for e in items], sum(e.sampled for e in items))

    passes = [forward(batch) for batch in live]
    recomputed = {"all": passes, "second": passes[1:], "sampler": []}[old_logprobs]
    return {"sample": forward(episodes), "old_logprobs": sum(recomputed), "update": 2 * sum(passes)}


def against_plan(config: Config, shape: ModelConfig, peaks: dict[str, int]) -> str:
    """The most GPU memory that the trainer's phases of a step had allocated, beside the plan of model/budget.py."""
    planned = budget.plan(shape, config.lora_rank, config.lora_targets, max(config.max_tokens, config.micro_tokens),
                          config.head_chunk, config.sync, resident=config.sleep_level == 0, kernel=ops.installed("fla"))
    names = {"old_logprobs": "recompute", "update": "update"}
    sizes = {phase: sum(size for item, size in planned[name].items() if item not in ("free", "CUDA context"))
             for phase, name in names.items()}
    return "GPU memory in GiB, at most, and as planned: " + ", ".join(
        f"{phase} {peaks[phase] / budget.GIB:.1f} ({size / budget.GIB:.1f})"
        for phase, size in sizes.items() if phase in peaks)


class Clock:
    """Seconds spent in named phases, and on a GPU the most bytes that were allocated in each."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self.peaks[phase] = max(self.peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def figures(self) -> dict[str, dict]:
        """For a row of the log: the seconds as a mean over the ranks, so that they add up to the step's; the most bytes
        of any rank. What comes next is counted from 0 on."""
        ranks = dist.gather([(self.seconds, self.peaks)])
        seconds = {phase: sum(times[phase] for times, _ in ranks) / len(ranks) for phase in self.seconds}
        peaks = {phase: max(most[phase] for _, most in ranks) for phase in self.peaks}
        self.seconds, self.peaks = {}, {}
        return {"time": seconds} | ({"memory": peaks} if peaks else {})


class Ledger:
    """Sums over all processes of a run and both its stages, in its cost.json: what has been paid for, work that was
    lost and done again too. A process that is killed has not entered what it did since its last step or measurement.
    "sampled" and "trained" are tokens; the former and "flops" are of GRPO, its measurements left out."""

    def __init__(self, folder: Path, config: Config):
        self.path, self.config, self.entered = folder / "cost.json", config, time.monotonic()
        self.sums = {"seconds": 0.0, "money": 0.0, "sampled": 0, "trained": 0, "flops": {}, "phases": {}} | (
            read_json(self.path) if self.path.exists() else {})

    def enter(self, row: dict, phases: dict[str, float]) -> None:
        """Add a row of the metrics, the seconds of its phases, and the time since the last entry."""
        sums, now = self.sums, time.monotonic()
        sums["seconds"] += now - self.entered
        sums["money"] += (now - self.entered) / 3600 * self.config.price_per_hour
        self.entered = now
        for name in ("sampled", "trained"):
            sums[name] += row.get(name, 0)
        for name, new in (("flops", row.get("flops", {})), ("phases", phases)):
            for key, value in new.items():
                sums[name][key] = sums[name].get(key, 0) + value
        if dist.rank() == 0:
            write_json(self.path, sums)

    def step(self, row: dict) -> str:
        """Enter a step; says what it took, and the run so far."""
        phases = row["time"]
        self.enter(row, phases)
        peak = 1e12 * self.config.peak_tflops * dist.ranks()
        shares = " ".join(f"{phase} {work / phases[phase] / peak:.0%}" for phase, work in row["flops"].items()
                          if work and phases.get(phase)) if peak else ""
        hours = self.sums["seconds"] / 3600
        money = f", ${self.sums['money']:.2f} at ${self.config.price_per_hour:g} an hour" * (self.sums["money"] > 0)
        return (f"          {row['sampled']:,} tokens sampled, {row['trained']:,} trained"
                f"{'; of the peak: ' * bool(shares)}{shares}; the run so far: {hours:.2f} hours{money}")
