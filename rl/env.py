"""The task world behind the trainer: a Python module that defines NAMES. `config.env` is its import path.

rl/stl_env.py is the world of this project, examples/countdown/env.py another one; docs/fork.md tells how to write one.
"""
import importlib
from types import ModuleType

STL = "rl.stl_env"
NAMES = (
    "LEVELS",  # their names, easiest first
    "Task",  # class: .id, .level, to_json() -> dict, Task.from_json(dict)
    "make_task",  # (level, split, index) -> Task, the same one on every machine
    "system_prompt",  # (tools: bool) -> str
    "user_prompt",  # (task) -> str
    "TOOLS",  # schemas in OpenAI's form; [] if there are none
    "call_tool",  # (task, name, arguments: dict, manner) -> str; must not raise, whatever a model sends
    "grade",  # (task, text) -> stl.monitor.Verdict of the last message; reward 1 if .ok
    "demonstrate",  # (task, rng, noise, tools=, explain=) -> messages of the expert, for the supervised stage
    # The compact chat format of a model from scratch; a world without it defines WORDS = [] and leaves the rest out
    "WORDS",  # its vocabulary beside control words and numbers
)
COMPACT = (
    "compact_task",  # (task) -> the task in WORDS
    "compact_tool",  # (text) -> a tool's answer in WORDS
    "compact_assistant",  # (text) -> what the expert says, with its <answer>, in WORDS
    "plain_assistant",  # (words) -> the text that grade reads
)


class EnvError(ValueError):
    """A module that is not a task world: the message says what it lacks."""


def open_env(name: str = STL) -> ModuleType:
    """The module `name`, once it has been seen to be a task world. Raises EnvError."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise EnvError(f"env = {name!r}: is no import path of a module, such as {STL}")
    try:
        env = importlib.import_module(name)
    except ImportError as error:
        raise EnvError(f"env = {name!r}: cannot be imported from here ({error})") from None
    needed = NAMES + COMPACT if getattr(env, "WORDS", None) else NAMES
    if missing := [item for item in needed if not hasattr(env, item)]:
        raise EnvError(f"env = {name!r}: the module lacks {', '.join(missing)}")
    return env
