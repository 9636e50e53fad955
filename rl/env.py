"""The task world behind the trainer: a Python module that defines NAMES. `config.env` is its import path, from the
folder of train.py or the one in which the program is started.

rl/stl_env.py is the world of this project, examples/countdown/env.py another one; docs/fork.md tells how to write one.
"""
import importlib
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
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


class EnvFault(RuntimeError):
    """A task world whose own code raises where nothing can go on, or too often: the message says what and where."""


class Fault(str):
    """What stands in place of a tool's answer if the tool raised."""


def open_env(name: str = STL) -> ModuleType:
    """The module `name`, once it has been seen to be a task world. Raises EnvError."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no folder there hides one of ours
    if not all(part.isidentifier() for part in name.split(".")):
        raise EnvError(f"env = {name!r}: is no import path of a module, such as {STL}")
    try:
        env = importlib.import_module(name)
    except Exception as error:  # whatever a user's own code can do
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise EnvError(f"env = {name!r}: there is no module {error.name}; it is looked for beside train.py and in "
                           "the folder in which you are") from None
        raise EnvError(f"env = {name!r}: cannot be imported ({told(error)})") from None
    needed = NAMES + COMPACT if getattr(env, "WORDS", None) else NAMES
    if missing := [item for item in needed if not hasattr(env, item)]:
        raise EnvError(f"env = {name!r}: the module lacks {', '.join(missing)}")
    return env


def told(error: Exception) -> str:
    """An exception in one line, with the last line of code outside of installed packages that led to it."""
    if isinstance(error, SyntaxError):  # says the place itself
        return f"{type(error).__name__}: {error}"
    places = traceback.extract_tb(error.__traceback__)
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    place = next((p for p in reversed(places) if not p.filename.startswith(library)), places[-1])
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno}: {place.line})"


def raised(function: Callable, error: Exception) -> str:
    """What a function of a task world raised, in one line."""
    said, code = told(error), getattr(function, "__code__", None)
    if code and not error.__traceback__.tb_next:  # it was never entered: other parameters than those of NAMES
        said = f"{type(error).__name__}: {error} ({code.co_filename}, line {code.co_firstlineno})"
    return f"{called(function)} raised {said}"


def called(function: Callable) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def ask(function: Callable, *arguments, **named):
    """What a function of a task world returns, asked by the program and not by a model: where it raises, or returns
    nothing, nothing can go on. Raises EnvFault."""
    try:
        answer = function(*arguments, **named)
        reason = f"{called(function)} returned nothing"
    except Exception as error:
        answer, reason = None, raised(function, error)
    if answer is None:
        raise EnvFault(f"{reason}; asked for {getattr(arguments[0], 'id', arguments)}")
    return answer


def ask_expert(demonstrate: Callable, task, *arguments, **named) -> list[dict]:
    """The messages of a world's expert. Raises EnvFault, also where they are not in OpenAI's form."""
    messages = ask(demonstrate, task, *arguments, **named)
    try:
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            content = message["content"] if message["role"] == "tool" else message.get("content") or ""
            "".join([content, *(call[key] for call in calls for key in ("name", "arguments"))])  # they are texts
        json.dumps(messages)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise EnvFault(f"{called(demonstrate)} returned no messages in OpenAI's form ({type(error).__name__}: {error})"
                       f"; asked for {getattr(task, 'id', task)}") from None
    return messages


def answer_call(call_tool: Callable, *arguments) -> str:
    """What call_tool answers, or a Fault."""
    try:
        text = call_tool(*arguments)
    except Exception as error:
        return Fault(raised(call_tool, error))
    return text if isinstance(text, str) else Fault(f"{called(call_tool)} returned no text but {text!r:.80}")
