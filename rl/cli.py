"""What sample.py and eval.py share: a policy chosen by name, policies without a network, and how a script ends."""
from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partialmethod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tqdm import tqdm

from rl.env import STL, EnvFault, open_env
from rl.episode import Episode
from rl.run import newest_run, read_settings, run_of
from stl import expert
from stl.prompts import answer_block, grade
from stl.search import search
from stl.world import Task

if TYPE_CHECKING:
    from rl.config import Config
    from rl.policy import Policy
    from rl.teacher import Teacher

SCRIPTED = ("expert", "naive", "search")
API = "api"
SEARCH_SECONDS = 10  # of wall time, for a task
POLICY_HELP = (f"expert, naive, search (does not know the solution; at most {SEARCH_SECONDS} s a task), api (the "
               "teacher of --config), or a run folder, its checkpoints/NAME, or a model folder (default: the newest "
               "run in runs/, else expert)")


class UsageError(ValueError):
    """A script was asked for something that cannot be: the message says what and what would be right."""


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line; `doc` is a script's docstring."""

    def __init__(self, name: str, doc: str):
        super().__init__(name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; see --help\n")

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        """The arguments, with a teacher's --config and the settings --KEY=VALUE that change it in `overrides`."""
        self.add_argument("--config", default="sft.py", help="settings of a teacher and its episodes (default sft.py); "
                          "any of them by --KEY=VALUE, such as --teacher_model=NAME --teacher_url=URL")
        args, args.overrides = self.parse_known_args(argv)
        if args.overrides and args.policy != API and not getattr(args, "collect", getattr(args, "model", None)):
            self.error(f"unrecognized arguments: {' '.join(args.overrides)}")
        return args


def run_script(name: str, work: Callable[[], None]) -> int:
    """Do `work` and return the exit code: 0, 2 for a user's mistake (one line), 1 if interrupted or if the task world
    fails.

    Mistakes are subclasses of ValueError and files that cannot be used; what else is raised is a fault of ours.
    """
    calm_bars()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter is no reason to stop
    try:
        work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (EnvFault, ValueError, OSError) as error:
        if type(error) is ValueError:
            raise
        print(f"{name}: {printable(str(error)).replace(chr(10), ' ')}", file=sys.stderr)
        return 1 if isinstance(error, EnvFault) else 2
    return 0


@cache  # once, however often it is asked for
def calm_bars() -> None:
    """In a file, where each time is a line, progress bars are drawn twice a minute."""
    if not sys.stderr.isatty():
        tqdm.__init__ = partialmethod(tqdm.__init__, mininterval=30, maxinterval=30)


def printable(text: str) -> str:
    """`text` with every control, format and other invisible character but the newline spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def temperature(text: str) -> float:
    """For argparse. 0 takes the likeliest token."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number from 0 to 100")
    return value


def natural(low: int) -> Callable[[str], int]:
    """For argparse: whole numbers from `low` on."""
    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {low}")
        return int(text)
    return read


def check_level(name: str, world: ModuleType) -> str:
    """The level's name. Raises UsageError."""
    if name not in world.LEVELS:
        raise UsageError(f"--level: unknown level {name!r}; the levels are {', '.join(world.LEVELS)}")
    return name


def open_world(policy: str) -> ModuleType:
    """The task world that the policy of this name was trained in; the STL world of a scripted one or a model folder."""
    folder = run_of(policy)
    return open_env(read_settings(folder).get("env", STL) if (folder / "config.json").is_file() else STL)


def check_target(option: str, file: str | None, endings: tuple[str, ...] = ("",)) -> None:
    """Raise UsageError, before any work is done, if the file that an option asks for cannot be written."""
    if not file:
        return
    path = Path(file).absolute()
    if not file.lower().endswith(endings):
        raise UsageError(f"{option} {file}: the name must end in one of {', '.join(endings)}")
    if not path.parent.is_dir() or path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise UsageError(f"{option} {file}: must be a file that may be written, in a folder that is there")
    check_folder(f"{option} {file}", path.parent)


def check_folder(name: str, folder: Path) -> None:
    """Make the folder if it is not there; UsageError about `name` if no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{name}: cannot be written ({error.strerror})") from None


class Scripted:
    """A policy without a network behind the interface of rl.policy.Policy. Luck plays no part, but for the search on a
    machine that is sometimes too slow for its time limit."""

    config = None

    def __init__(self, name: str, style: dict | None = None):
        self.name, self.style = name, style or {}  # the latter: arguments of expert.solve

    def play(self, tasks: list[Task], samples: int, seed: tuple = (), temperature: float | None = None,
             progress: Callable[[Episode], None] | None = None) -> list[Episode]:
        """As Policy.play; an episode has messages but no tokens."""
        episodes = []
        for group, task in enumerate(tasks):
            messages = self._messages(task)
            content = messages[-1]["content"]
            for sample in range(samples):
                episode = Episode(task, 0, group, sample, messages=messages,
                                  turns=sum(message["role"] == "assistant" for message in messages))
                episode.end("no answer" if answer_block(content) is None else "answer", grade(task, content))
                episodes.append(episode)
                if progress:
                    progress(episode)
        return episodes

    def check(self, task: Task) -> None:
        """Raise UsageError if the expert has no plan for `task` that can be shown."""
        if self.name == "expert":
            self._messages(task)

    def _messages(self, task: Task) -> list[dict]:
        if self.name == "search":
            path, reason = search(task, SEARCH_SECONDS)
            return _answer(f"Search: {reason}.", path)
        if self.name == "naive":
            path = expert.naive(task)
            return _answer("Each region in turn." if path else "There is no path to some region.", path)
        if task.plan is None:
            raise UsageError(f"task {task.id!r} has no plan for the expert to show; give --policy search or a folder")
        try:
            return expert.solve(task, **self.style)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UsageError(f"task {task.id!r}: the plan cannot be shown ({type(error).__name__}: {error})") from None


def _answer(words: str, path: list[list[float]] | None) -> list[dict]:
    content = words if path is None else f"{words}\n<answer>{json.dumps(path)}</answer>"
    return [{"role": "assistant", "content": content}]


def default_policy() -> str:
    """The policy where none is named: the newest run, else the expert."""
    return str(newest_run() or "expert")


def warn_of_expert(asked: str | None, name: str) -> None:
    """Say so if the expert plans because no other policy was asked for and there is no run."""
    if not asked and name == "expert":
        print("no run with a checkpoint in runs/: the expert plans", file=sys.stderr)


def teacher_settings(args: argparse.Namespace) -> Config | None:
    """The settings of the teacher, if that is the policy."""
    if args.policy != API:
        return None
    from rl.config import load_config  # brings torch, which scripted policies do without

    return load_config(args.config, args.overrides)


def open_model(args: argparse.Namespace) -> Policy:
    """The model of eval.py --model with its --adapter, and with the settings of --config but for what else is said."""
    import torch

    from rl.config import load_config, replace
    from rl.policy import adapter_folder, make_policy

    gpu = torch.cuda.is_available()
    changes = {"model": args.model, "adapter": args.adapter or "", "sampler": "vllm" if gpu else "torch"}
    changes |= ({} if gpu else {"device": "cpu"}) | model_changes(args)
    config = replace(load_config(args.config, args.overrides), **changes)
    if args.adapter:  # of any rank and on any layers
        stored = json.loads((adapter_folder(config) / "adapter_config.json").read_bytes())
        shape = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_targets": "target_modules"}
        known = {ours: stored[name] for ours, name in shape.items() if isinstance(stored.get(name), int | float | list)}
        config = replace(config, **known)
    return make_policy(config, config.model, adapter=bool(args.adapter))


def model_changes(args: argparse.Namespace) -> dict:
    """The settings that eval.py --tools and --sampler change."""
    tools = {"tools": args.tools == "on"} if args.tools else {}
    return tools | ({"sampler": args.sampler} if args.sampler else {})


def open_policy(name: str, config: Config | None = None, file: Path | None = None, **changes
                ) -> Policy | Scripted | Teacher:
    """The policy called `name`, see POLICY_HELP. torch is imported only for one with a network. UsageError.

    `config` has the teacher's settings, and how the expert talks; `file` is where conversations are to be collected;
    `changes` are made to the settings of a run or a model folder.
    """
    if changes and (name in SCRIPTED or name == API):
        raise UsageError(f"--{next(iter(changes))}: is for runs and models, not for {name}")
    if name in SCRIPTED:
        style = config and {"tools": config.tools, "explain": "plan" if config.chat == "compact" else "normal"}
        return Scripted(name, style)
    if name == API:
        from rl.teacher import Teacher

        model = re.sub(r"[^\w.-]", "_", config.teacher_model)  # a measurement that is repeated costs nothing
        return Teacher(config, (file or Path(f"data/api-{model}.jsonl")).with_suffix(".requests.jsonl"))
    if not Path(name).is_dir():
        close = difflib.get_close_matches(name, (*SCRIPTED, API), n=1)
        hint = f"did you mean {close[0]}? Or " if close else ""
        if kept := sorted(path.parent.name for path in Path(name).parent.glob("*/state.json")) if "/" in name else []:
            hint = f"beside it are {', '.join(kept)}; "
        raise UsageError(f"--policy: no folder {name!r}; {hint}give expert, naive, search, api, a run folder or a "
                         "model folder")
    if not (run_of(name) / "config.json").is_file():
        raise UsageError(f"--policy {name}: neither a run folder nor a model folder, as it has no config.json")
    import torch

    from rl.policy import load_policy

    return load_policy(name, **({} if torch.cuda.is_available() else {"device": "cpu"}) | changes)
