"""Sets of tasks: the endless stream that training draws from, the held-out set, and the expert's demonstrations.

    python -m rl.tasks --make               # the three sets as files in data/tasks/, for other programs: a minute

The stream and the held-out set make each task anew from its name and read no files: that takes about 10 ms a task,
is the same on every machine, and cannot be out of date.
"""
from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from rl import cli
from rl.env import STL, EnvFault, ask, ask_expert, open_env
from rl.run import writing
from rl.workers import Workers
from stl.levels import DISTILL_COUNTS, EVAL_COUNTS, RL_COUNTS, VERSION, make_task
from stl.world import Task, unique

if TYPE_CHECKING:
    from rl.config import Config

CHUNK = 16  # tasks that a worker makes at a time
SETS = {"eval": EVAL_COUNTS, "rl": RL_COUNTS, "distill": DISTILL_COUNTS}  # split: {level: tasks}


def training_tasks(config: Config, step: int, n: int) -> list:
    """The n tasks of a step, of config.mix shuffled without end; steps count from 0 and all have the same n. What comes
    is a function of (mix, split, seed, step) alone, so that resuming needs no state."""
    world = open_env(config.env)
    mix = [(level, index) for level in world.LEVELS for index in range(config.mix.get(level, 0))]
    chosen = (mix[i] for i in shuffled(len(mix), config.seed, step * n, n))
    return [ask(world.make_task, level, config.split, index) for level, index in chosen]


def shuffled(size: int, seed: int, first: int, n: int) -> list[int]:
    """`n` numbers, from place `first` on, of an endless row of seeded shuffles of range(size)."""
    epochs = range(first // size, (first + n - 1) // size + 1)
    order = np.concatenate([_generator(seed, epoch).permutation(size) for epoch in epochs])
    return order[first % size:][:n].tolist()


def held_out(eval_mix: dict[str, int], env: str = STL) -> list:
    """The first tasks of the split "eval" of each level, easiest level first."""
    world = open_env(env)
    return [_held_out(world.make_task, level, index) for level in world.LEVELS
            for index in range(eval_mix.get(level, 0))]


@cache  # each stage of a run asks for them, and nobody writes to a task
def _held_out(make_task: Callable, level: str, index: int):
    return ask(make_task, level, "eval", index)


def demonstrations(config: Config, count: int, folder: str | Path = "data") -> list[dict]:
    """`count` conversations of the scripted expert: {"task": its JSON, "messages": assistant and tool messages}.

    Tasks of the split "sft" with levels in the proportions of config.mix; how careless the expert is says
    config.sft_noise. Kept as `_keep` says.
    """
    settings = {"env": config.env, "seed": config.seed, "noise": config.sft_noise, "tools": config.tools,
                "explain": "plan" if config.chat == "compact" else "normal"}
    jobs = [(level, index, settings) for index, level in enumerate(proportional(config.mix, count))]
    return list(map(json.loads, _keep(_demonstrate, jobs, "demonstrations", folder, open_env(config.env).demonstrate)))


def named_tasks(name: str, folder: str | Path = "data") -> list[Task]:
    """The tasks that a user names: a set ("distill"), the first of a split by level ("sft:L0=3000,L1=5"), or a file
    with a task's JSON on each line. Kept as `_keep` says. Raises UsageError."""
    split, colon, counts = name.partition(":")
    if Path(name).is_file():
        return [task for _, task in read_lines(name, Task.from_json)]
    if name not in SETS and not (colon and split.isalnum()):
        raise cli.UsageError(f"--tasks {name}: no such file; give one, or {', '.join(SETS)}, or some of a split, such "
                             "as sft:L0=3000,L1=5")
    mix = SETS[name] if name in SETS else dict(map(_count, counts.split(",")))
    jobs = [(level, split, index) for level, n in mix.items() for index in range(n)]
    return [Task.from_json(json.loads(line)) for line in _keep(_task_line, jobs, "tasks", folder)]


def _count(text: str) -> tuple[str, int]:
    level, _, number = text.partition("=")
    if not number.isdecimal() or not 0 < int(number) < 10**9:
        raise cli.UsageError(f"--tasks: {text!r}: expected a level and how many, such as L0=3000")
    return cli.check_level(level, open_env()), int(number)


def read_lines(path: str | Path, read: Callable) -> Iterator[tuple[dict, object]]:
    """The object on each line of a file and what `read` makes of it. UsageError names the file, the line and why."""
    with open(path, "rb") as file:
        for i, line in enumerate(file, 1):
            try:
                data = json.loads(line, object_pairs_hook=unique)
                yield data, read(data)
            except KeyError as error:
                raise cli.UsageError(f"{path}, line {i}: {error} is missing; is it the right kind of file?") from None
            except (ValueError, TypeError, RecursionError) as error:
                raise cli.UsageError(f"{path}, line {i}: {str(error)[:300]}") from None


def reserved(robots: Collection[tuple[float, float]], folder: str | Path = "data") -> dict[str, str]:
    """Task.hash() -> id of every evaluation and RL task with one of these robots (half width, v_max): no conversation
    about it may be learnt from. Kept as `_keep` says.

    The hash contains the robot and a level has one, so other levels need not be made; a task's name says nothing.
    """
    found: dict[str, str] = {}
    for level in SETS["eval"] | SETS["rl"]:
        if robot_of(make_task(level, "eval", 0).to_json()) in robots:
            jobs = [(level, split, i) for split in ("eval", "rl") for i in range(SETS[split].get(level, 0))]
            digests = _keep(_task_hash, jobs, f"tasks of {level} to keep out", folder)
            found |= {digest: "-".join(map(str, job)) for digest, job in zip(digests, jobs, strict=True)}
    return found


def robot_of(task: dict) -> tuple[float, float]:
    """(half width, v_max) in a task's JSON."""
    return float(task["robot"]["half_width"]), float(task["robot"]["v_max"])


def proportional(mix: dict[str, int], count: int) -> list[str]:
    """`count` levels in the proportions of `mix`, by largest remainders."""
    total = sum(mix.values())
    shares = {level: divmod(count * mix[level], total) for level in sorted(mix)}
    left = count - sum(whole for whole, _ in shares.values())
    extra = sorted(shares, key=lambda level: -shares[level][1])[:left]
    return [level for level, (whole, _) in shares.items() for _ in range(whole + (level in extra))]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_sets(folder: str | Path, sets: dict[str, dict[str, int]]) -> dict:
    """Write SPLIT.jsonl for each set, a task a line, then manifest.json, and return what the latter says.

    RuntimeError if some task is there twice, within a set or in two of them: no two may differ in name alone.
    """
    folder = Path(folder)
    cli.check_folder(str(folder), folder)
    jobs = [(level, split, i) for split, counts in sets.items() for level, n in counts.items() for i in range(n)]
    made = _make(_task_hash_and_line, jobs, "tasks")
    if twice := [digest for digest, n in Counter(digest for digest, _ in made).items() if n > 1]:
        names = [f"{job}" for job, (digest, _) in zip(jobs, made, strict=True) if digest in twice]
        raise RuntimeError(f"the same task under several names: {', '.join(names)}")
    manifest = {"version": VERSION, "seed": "sha256 of a task's id, LEVEL-SPLIT-INDEX", "tasks": len(jobs), "sets": {}}
    for split, counts in sets.items():
        path = folder / f"{split}.jsonl"
        _write(path, [line for (_, of, _), (_, line) in zip(jobs, made, strict=True) if of == split])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["sets"][split] = {"file": path.name, "tasks": sum(counts.values()), "levels": counts, "sha256": digest}
    _write(folder / "manifest.json", [json.dumps(manifest, indent=2)])
    return manifest


def _write(path: Path, lines: list[str]) -> None:
    """The whole file or none of it."""
    with writing(path):
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in lines))
        temporary.replace(path)


def _keep(work: Callable, jobs: list[tuple], what: str, folder: str | Path, code: Callable = make_task) -> list[str]:
    """The line that `work` makes of each job, kept in a file of `folder` that is named by a hash of all that decides
    them: the jobs, this code and that of the folder where `code` is. UsageError if nothing can be kept there."""
    path = Path(folder) / f"{what.replace(' ', '-')}-{_fingerprint(jobs, code)}.jsonl"
    if not path.exists():
        cli.check_folder(f"{folder}, where {what} are kept", Path(folder))
        _write(path, _make(work, jobs, what))
    return path.read_text().splitlines()


def _make(work: Callable, jobs: list[tuple], what: str) -> list:
    """The work done for each job, on all cores; in this process if the jobs are too few to be worth starting others."""
    chunks, done = [jobs[i:i + CHUNK] for i in range(0, len(jobs), CHUNK)], {}
    count = min(cores(), len(jobs) // CHUNK)
    with (closing(Workers(count, 0)) as workers,  # without torch or the script, and deaf to Ctrl-C
          tqdm(total=len(jobs), desc=what, unit="", disable=not count) as bar):
        for number, chunk in enumerate(chunks):
            workers.submit(number, [(_do_all, work, chunk)])
        while len(done) < len(chunks):
            for number, (results,) in workers.collect(block=True):
                if isinstance(results, EnvFault):
                    raise results
                if isinstance(results, str):
                    raise RuntimeError(f"{what}: {results}")
                done[number] = results
                bar.update(len(results))
    return [result for number in sorted(done) for result in done[number]]


def _do_all(work: Callable, jobs: list[tuple]) -> list | EnvFault | str:
    """The results, or what went wrong: a fault of a task world, or the traceback."""
    try:
        return [work(job) for job in jobs]
    except EnvFault as error:
        return error
    except Exception:
        return traceback.format_exc()


def _task_hash_and_line(job: tuple[str, str, int]) -> tuple[str, str]:
    task = make_task(*job)
    return task.hash(), json.dumps(task.to_json())


def _task_hash(job: tuple[str, str, int]) -> str:
    return make_task(*job).hash()


def _task_line(job: tuple[str, str, int]) -> str:
    return json.dumps(make_task(*job).to_json())


def _demonstrate(job: tuple) -> str:
    level, index, settings = job
    env = open_env(settings["env"])
    task = ask(env.make_task, level, "sft", index)
    messages = ask_expert(env.demonstrate, task, _generator(settings["seed"], index), settings["noise"],
                          tools=settings["tools"], explain=settings["explain"])
    return json.dumps({"task": task.to_json(), "messages": messages})


def _fingerprint(jobs: list[tuple], code: Callable) -> str:
    """Short hash of the jobs and of the code that does them: this file and those beside the one of `code`."""
    digest = hashlib.sha256(json.dumps(jobs).encode())
    for path in [Path(__file__), *sorted(Path(inspect.getfile(code)).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("python -m rl.tasks", __doc__)
    parser.add_argument("--make", action="store_true", required=True, help="make the sets eval, rl and distill")
    parser.add_argument("--out", default="data/tasks", metavar="FOLDER", help="where (default data/tasks)")
    args = parser.parse_args(argv)

    def work() -> None:
        for split, made in make_sets(args.out, SETS)["sets"].items():
            print(f"{Path(args.out) / made['file']}: {made['tasks']} tasks of the split {split}")
    return cli.run_script("rl.tasks", work)


if __name__ == "__main__":
    from rl.tasks import main  # under the module's own name, by which workers find its functions

    sys.exit(main())
