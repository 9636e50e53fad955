"""Which modules are task worlds, and how it is said that one is not."""
import sys
from functools import partial

import pytest

from rl.config import ConfigError, load_config, replace
from rl.env import NAMES, EnvError, EnvFault, ask, ask_expert, open_env


def test_the_worlds_of_this_repository():
    assert open_env().make_task("L0", "eval", 0).id == "L0-eval-0"
    assert open_env("examples.countdown.env").make_task("N2", "eval", 0).level == "N2"


@pytest.mark.parametrize("name, said", [("no.such", "there is no module no; it is looked for"),
                                        ("rl.nosuch.env", "there is no module rl.nosuch; it is looked for"),
                                        ("json", f"lacks {', '.join(NAMES)}"),
                                        ("stl.levels", "lacks TOOLS, call_tool, demonstrate, WORDS")])
def test_other_modules_are_refused(name, said):
    with pytest.raises(EnvError, match=f"env = '{name}': .*{said}"):
        open_env(name)
    with pytest.raises(ConfigError, match=said):
        replace(load_config("tiny.py"), env=name)


def test_levels_are_the_world_s():
    with pytest.raises(ConfigError, match="mix: unknown level 'L0'; the levels are N2, N3, N4"):
        replace(load_config("tiny.py"), env="examples.countdown.env")


def test_a_world_in_the_folder_where_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    texts = {"good": "from examples.countdown.env import *", "bad": "x = 1\nLEVELS = y", "odd": "x = (",
             "lost": "\nimport jsonn", "other": "from json import nothing"}
    for name, text in texts.items():
        (tmp_path / "my_worlds" / name).mkdir(parents=True)
        (tmp_path / "my_worlds" / name / "env.py").write_text(text)
    assert open_env("my_worlds.good.env").make_task("N2", "eval", 0).level == "N2"
    with pytest.raises(EnvError, match="cannot be imported .NameError: name 'y' is not defined .*line 2: LEVELS = y"):
        open_env("my_worlds.bad.env")
    with pytest.raises(EnvError, match="cannot be imported .SyntaxError: .*env.py, line 1"):
        open_env("my_worlds.odd.env")
    with pytest.raises(EnvError, match="NotFoundError: No module named 'jsonn' .*, line 2: import jsonn"):
        open_env("my_worlds.lost.env")
    with pytest.raises(EnvError, match="cannot be imported .ImportError: cannot import name 'nothing' .*line 1"):
        open_env("my_worlds.other.env")


@pytest.mark.parametrize("messages", [
    3, ["hello"], [{"content": "x"}], [{"role": "tool", "content": None}], [{"role": "assistant", "content": 3}],
    [{"role": "assistant", "tool_calls": [{"name": "a"}]}], [{"role": "assistant", "content": "", "odd": {3}}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}]])
def test_an_expert_that_says_no_messages(messages):
    with pytest.raises(EnvFault, match="returned no messages in OpenAI's form .*; asked for t"):
        ask_expert(lambda task: messages, "t")
    said = [{"role": "assistant", "content": None, "tool_calls": None}, {"role": "tool", "content": ""}]
    assert ask_expert(lambda task: said, "t") == said


def demonstrate(task):
    return {}["x"] if task else None


@pytest.mark.parametrize("arguments, said", [
    ((3,), r"demonstrate raised KeyError: 'x' \(.*test_env.py, line \d+: return .*\); asked for \(3,\)"),
    ((0,), r"demonstrate returned nothing; asked for \(0,\)"),
    ((0, 1), r"demonstrate raised TypeError: demonstrate\(\) takes 1 .* \(.*test_env.py, line \d+\); asked"),
])
def test_a_fault_of_a_world_says_what_and_where(arguments, said):
    with pytest.raises(EnvFault, match=said):
        ask(demonstrate, *arguments)
    assert ask(len, "abc") == 3 and ask(partial(pow, 2), 3) == 8
    with pytest.raises(EnvFault, match="partial.* raised TypeError"):
        ask(partial(pow, 2), "x")
