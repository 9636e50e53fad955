"""train.py in small, for tests: a few steps, and a grader that flips a coin so that groups are mixed from the start.

    python small_run.py [--kill STAGE:STEP:PHASE] [--count] [train.py's arguments]
    python small_run.py --kills 50 [--seed 0]

--kill ends the process with SIGKILL at a chosen moment: in the supervised stage right after a step's checkpoint; in a
GRPO step after its rollouts are written ("rollouts"), after its update ("update"), or half-way through writing its
checkpoint ("checkpoint"). --count lets the sampler count its turns, as vLLM's does. --kills does so at random moments
in all phases of runs that are resumed each time, until so many processes were killed, and compares what each run comes
to with a run that nobody disturbed.
"""
import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.figure  # noqa: F401  that a forked child need not

import rl.rollout
import train
from rl.learner import Learner
from rl.sampler import make_seed
from rl.sampler_torch import TorchSampler
from stl.monitor import Verdict

SMALL = ["--name=small", "--sft_steps=12", "--sft_tasks=24", "--sft_eval_every=0", "--steps=4",
         "--tasks_per_step=4", "--samples=4", "--max_turns=2", "--max_turn_tokens=12", "--eval_every=2", "--threads=1",
         "--checkpoint_seconds=0", "--micro_tokens=700", "--sft_stop=1", "--sft_warmup=2",
         '--mix={"L0": 40}', '--eval_mix={"L0": 3}']


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def coin(episode, text, grade=None):
    """A reward that depends on nothing but the episode's seed and what was sampled."""
    ok = make_seed(episode.seed, sum(episode.ids)) % 2 == 0
    episode.end("answer", Verdict(ok, [], [], "by coin"))


def flip_at_the_end(take_turn):
    """Episodes that would end by their length are graded too: an untrained model rarely ends a turn."""
    def wrapped(chat, episode, completion, config):
        if completion.stopped:
            return take_turn(chat, episode, completion, config)
        episode.append(completion.ids, completion.logprobs)
        episode.turns += 1
        episode.messages.append({"role": "assistant", "content": chat.text(completion.ids)})
        coin(episode, "")

    return wrapped


def arrange_kill(where: str) -> None:
    stage, step, phase = where.split(":")

    def killing(function, when):
        def wrapped(*args, **kwargs):
            if when(*args, **kwargs):
                if phase == "checkpoint":  # the weights are there, the rest is not
                    kwargs["fill"] = None
                    args = [*args[:4], {}, lambda folder: ((folder / "half").write_bytes(b"0" * 1000), die())]
                    return function(*args)
                result = function(*args, **kwargs)
                die()
                return result
            return function(*args, **kwargs)

        return wrapped

    if phase == "rollouts":
        train.Run.write_episodes = killing(train.Run.write_episodes, lambda run, at, episodes: at == int(step))
    elif phase == "update":
        train.grpo_step = killing(train.grpo_step, lambda config, run, policy, learner, at, clock: at == int(step))
    else:
        train.Run.save = killing(train.Run.save, lambda run, name, at, *rest: (name, at) == (stage, int(step)))


def count_turns() -> None:
    """The torch sampler counts nothing of its own."""
    step = TorchSampler.step

    def counted(self, *args):
        done = step(self, *args)
        self.turns = getattr(self, "turns", 0) + len(done)
        return done

    def metrics(self):
        turns, self.turns = self.turns, 0
        return {"turns": turns, "preemptions": 0}

    TorchSampler.step, TorchSampler.metrics = counted, metrics


# ------------------------------------------------------------------------------------------------- kills at random


class Moments:
    """Counts, phase by phase, the calls of what takes time or touches the disk, and dies at or soon after one."""

    def __init__(self, phase: str | None = None, number: int = 0, delay: float = 0.0):
        self.target, self.delay = (phase, number), delay
        self.phases, self.counts = ["opening"], Counter()

    def install(self) -> None:
        clock = train.Clock.__call__

        @contextmanager
        def timed(own, name):
            with self.phase(name), clock(own, name):
                yield

        train.Clock.__call__ = timed
        for owner, name in ((train, "imitate"), (train, "evaluate"), (train.Run, "write_episodes"), (train.Run, "log"),
                            (train.Run, "save"), (train.Run, "finish")):
            setattr(owner, name, self.phase(name)(getattr(owner, name)))  # a context manager decorates, too
        for owner, name in ((TorchSampler, "step"), (TorchSampler, "load"), (Learner, "_forward"), (Learner, "_step"),
                            (os, "fsync"), (os, "replace"), (Path, "replace"), (Path, "rename"), (shutil, "rmtree")):
            setattr(owner, name, self.counted(getattr(owner, name)))

    @contextmanager
    def phase(self, name: str):
        self.phases.append(name)
        try:
            yield
        finally:
            self.phases.pop()

    def counted(self, function):
        def wrapped(*args, **kwargs):
            self.counts[self.phases[-1]] += 1
            if self.target == (self.phases[-1], self.counts[self.phases[-1]]):
                threading.Timer(self.delay, die).start() if self.delay else die()
            return function(*args, **kwargs)

        return wrapped


def play(folder: Path, moments: Moments) -> int:
    """Run or resume the small run in `folder` in a forked child; its exit code, -9 if it was killed."""
    if (child := os.fork()) == 0:
        os.chdir(folder)
        with open("output.txt", "a") as output:
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
        moments.install()
        code = 1
        try:
            code = train.main([*SMALL, "--sft_steps=5", "--steps=3"])
            Path("counts.json").write_text(json.dumps(moments.counts))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def result(folder: Path) -> dict:
    """All that a run comes to: its metrics without times, and every file of its checkpoints and episodes."""
    run = folder / "runs" / "small"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(row["stage"], row["step"]) for row in rows if row["stage"] != "eval"]
    assert steps == [("sft", i) for i in range(1, 6)] + [("grpo", i) for i in range(1, 4)], steps
    files = [path for name in ("checkpoints", "episodes") for path in (run / name).glob("**/*") if path.is_file()]
    return {"metrics": [{key: value for key, value in row.items() if key != "time"} for row in rows],
            **{str(path.relative_to(run)): path.read_bytes() for path in sorted(files)}}


def kill_often(kills: int, seed: int, place: Path) -> None:
    """Kill `kills` processes at moments drawn with `seed`; SystemExit if a run differs from the undisturbed one."""
    def start(name: str) -> Path:
        (place / name).mkdir()
        return place / name

    def check(code: int, folder: Path) -> None:
        if code or folder.name != "undisturbed" and (found := result(folder)) != expected:
            differ = [] if code else [key for key in expected | found if expected.get(key) != found.get(key)]
            said = (folder / "output.txt").read_text()[-3000:]
            sys.exit(f"{folder.name}, seed {seed}: exit code {code}, {differ}\n{said}")

    check(play(start("undisturbed"), Moments()), place / "undisturbed")
    expected, chance = result(place / "undisturbed"), random.Random(seed)
    counts = json.loads((place / "undisturbed" / "counts.json").read_text())
    dead, runs, queue = Counter(), 0, []
    while dead.total() < kills:
        runs, code = runs + 1, -9
        folder = start(f"run {runs}")
        while code == -9:
            queue = queue or chance.sample(sorted(counts), len(counts))  # each phase before any comes again
            phase = queue.pop()
            moments = Moments(phase, chance.randint(1, counts[phase]), chance.choice((0.0, chance.uniform(0, 0.05))))
            code = play(folder, moments if dead.total() < kills else Moments())
            dead[phase] += code == -9
        check(code, folder)
        shutil.rmtree(folder)
    print(f"{dead.total()} kills in {runs} runs, each equal to the undisturbed one: "
          + ", ".join(f"{phase} {count}" for phase, count in sorted(dead.items())))


def main(arguments: list[str]) -> int:
    rl.rollout.finish = coin
    rl.rollout.take_turn = flip_at_the_end(rl.rollout.take_turn)
    if arguments[:1] == ["--kills"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--kills", type=int)
        parser.add_argument("--seed", type=int, default=0)
        options = parser.parse_args(arguments)
        with tempfile.TemporaryDirectory() as place:
            kill_often(options.kills, options.seed, Path(place))
        return 0
    if arguments[:1] == ["--kill"]:
        arrange_kill(arguments[1])
        train.main([*SMALL, *arguments[2:]])
        raise SystemExit(f"{arguments[1]} never came")
    if arguments[:1] == ["--count"]:
        count_turns()
        arguments = arguments[1:]
    return train.main([*SMALL, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
