"""Which modules are task worlds, and how it is said that one is not."""
import sys

import pytest

from rl.config import ConfigError, load_config, replace
from rl.env import NAMES, EnvError, open_env


def test_the_worlds_of_this_repository():
    assert open_env().make_task("L0", "eval", 0).id == "L0-eval-0"
    assert open_env("examples.countdown.env").make_task("N2", "eval", 0).level == "N2"


@pytest.mark.parametrize("name, said", [("no.such", "cannot be imported"), ("json", f"lacks {', '.join(NAMES)}"),
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
    texts = {"good": "from examples.countdown.env import *", "bad": "x = 1\nLEVELS = y", "odd": "x = ("}
    for name, text in texts.items():
        (tmp_path / "my_worlds" / name).mkdir(parents=True)
        (tmp_path / "my_worlds" / name / "env.py").write_text(text)
    assert open_env("my_worlds.good.env").make_task("N2", "eval", 0).level == "N2"
    with pytest.raises(EnvError, match="cannot be imported .NameError: name 'y' is not defined .*line 2: LEVELS = y"):
        open_env("my_worlds.bad.env")
    with pytest.raises(EnvError, match="cannot be imported .SyntaxError: .*env.py, line 1"):
        open_env("my_worlds.odd.env")
