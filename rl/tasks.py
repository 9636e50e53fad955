"""Sets of tasks: the endless stream that training draws from, the held-out set, and the expert's demonstrations."""
from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

import stl
from stl.expert import demonstrate
from stl.levels import LEVELS, make_task
from stl.world import Task

if TYPE_CHECKING:
    from rl.config import Config

CHUNK = 16  # demonstrations that a worker makes at a time


class TaskStream:
    """The tasks of a mix in an endless row of seeded shuffles: each task once before any comes again.

    What comes at a step is a function of (mix, split, seed, step) alone, so that resuming needs no state.
    """

    def __init__(self, mix: dict[str, int], split: str, seed: int):
        self.split, self.seed = split, seed
        self.tasks = [(level, index) for level in LEVELS for index in range(mix.get(level, 0))]

    def batch(self, step: int, n: int) -> list[Task]:
        """The n tasks of a step; steps count from 0 and all have the same n."""
        size, first = len(self.tasks), step * n
        order = {epoch: _generator(self.seed, epoch).permutation(size)
                 for epoch in range(first // size, (first + n - 1) // size + 1)}
        chosen = (self.tasks[order[i // size][i % size]] for i in range(first, first + n))
        return [make_task(level, self.split, index) for level, index in chosen]


def held_out(eval_mix: dict[str, int]) -> list[Task]:
    """The first tasks of the split "eval" of each level, easiest level first."""
    return [make_task(level, "eval", index) for level in LEVELS for index in range(eval_mix.get(level, 0))]


def demonstrations(config: Config, count: int, folder: str | Path = "data") -> list[dict]:
    """`count` conversations of the scripted expert: {"task": its JSON, "messages": assistant and tool messages}.

    Tasks of the split "sft" with levels in the proportions of config.mix; a share config.sft_noise of them errs on
    purpose. Made on all cores and kept in `folder` under a hash of all that decides them, this code included.
    """
    settings = {"seed": config.seed, "noise": config.sft_noise, "tools": config.tools,
                "explain": "plan" if config.chat == "compact" else "normal"}
    jobs = [(level, index, settings) for index, level in enumerate(proportional(config.mix, count))]
    path = Path(folder) / f"demonstrations-{_fingerprint(jobs)}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in _make(jobs)))
        temporary.replace(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def proportional(mix: dict[str, int], count: int) -> list[str]:
    """`count` levels in the proportions of `mix`, by largest remainders."""
    total = sum(mix.values())
    shares = {level: divmod(count * mix[level], total) for level in LEVELS if level in mix}
    left = count - sum(whole for whole, _ in shares.values())
    extra = sorted(shares, key=lambda level: -shares[level][1])[:left]
    return [level for level, (whole, _) in shares.items() for _ in range(whole + (level in extra))]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make(jobs: list[tuple]) -> list[str]:
    """The lines of the file; in this process if the jobs are too few to be worth starting others."""
    bar = {"total": len(jobs), "desc": "demonstrations", "unit": " tasks", "disable": len(jobs) <= CHUNK}
    workers = min(cores(), len(jobs) // CHUNK)
    if workers < 2:
        return [_demonstrate(job) for job in tqdm(jobs, **bar)]
    with multiprocessing.get_context("spawn").Pool(workers, _ignore_interrupt) as pool:
        return list(tqdm(pool.imap(_demonstrate, jobs, CHUNK), **bar))


def _demonstrate(job: tuple) -> str:
    level, index, settings = job
    task = make_task(level, "sft", index)
    messages = demonstrate(task, _generator(settings["seed"], index), settings["noise"], tools=settings["tools"],
                           explain=settings["explain"])
    return json.dumps({"task": task.to_json(), "messages": messages})


def _ignore_interrupt() -> None:
    """Ctrl-C is for the parent, which ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _fingerprint(jobs: list[tuple]) -> str:
    """Short hash of the jobs and of the code that does them."""
    digest = hashlib.sha256(json.dumps(jobs).encode())
    for path in [Path(__file__), *sorted(Path(stl.__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
