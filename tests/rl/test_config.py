"""Settings: typed, ranged, and refused in one line that names what is wrong and what would be right."""
import dataclasses
import json
import re

import pytest

from rl.config import (
    CHOICES,
    CONFIGS,
    FIELDS,
    POSITIVE,
    SHARES,
    Config,
    ConfigError,
    from_json,
    load_config,
    replace,
    to_json,
)
from rl.run import changed_settings, read_settings
from stl.levels import EVAL_COUNTS, RL_COUNTS


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.py")), ids=lambda file: file.name)
def test_every_config_loads_and_survives_json(file):
    config = load_config(file.name)
    assert config == load_config(file.stem) == load_config(str(file)) == from_json(to_json(config))
    assert config.name == file.stem and config.about and dataclasses.is_dataclass(config)


def test_the_main_run_trains_on_the_ladder():
    config = load_config("l8.py")
    assert config.mix == RL_COUNTS and config.eval_mix == EVAL_COUNTS
    assert config.tasks_per_step * config.samples == 256


@pytest.mark.parametrize("name, changes", [
    ("l8_distilled", {"adapter", "steps"}), ("l8_notools", {"tools", "steps", "max_turn_tokens"}),
    ("l8_thinking", {"thinking", "max_turn_tokens"}),
])
def test_the_other_large_runs_are_the_main_run_but_for(name, changes):
    ours, main = to_json(load_config(name)), to_json(load_config("l8"))
    assert {key for key in ours if ours[key] != main[key]} == changes | {"name", "about"}


def test_the_main_run_says_why():
    """Every setting that is not about the supervised stage, the CPU or vLLM's inner works stands in l8.py."""
    text = (CONFIGS / "l8.py").read_text()
    own = set(re.findall(r"^    (\w+)=", text, re.MULTILINE))
    left = {name for name in FIELDS.keys() - own if not name.startswith(("sft_", "engine_", "probe_", "teacher_"))}
    assert left <= {"env", "threads", "checkpoint_seconds", "max_drawn", "merge_rounding", "prefix_caching",
                    "enforce_eager"}


def test_every_check_is_of_a_setting_and_allows_the_default():
    assert not (CHOICES.keys() | POSITIVE | SHARES) - FIELDS.keys()
    Config(model="somewhere", mix={"L1": 1}, eval_mix={"L1": 1})


def test_overrides():
    config = load_config("tiny.py", ["--lr=2e-5", "--dual-clip=none", "--steps=3", "--tools=false", "--name=7",
                                     "--betas=[0.5, 0.9]", '--mix={"L0": 3}', "--lora_targets=('q_proj',)"])
    assert (config.lr, config.dual_clip, config.steps, config.tools, config.betas) == (2e-5, None, 3, False, (0.5, 0.9))
    assert (config.name, config.mix, config.lora_targets) == ("7", {"L0": 3}, ("q_proj",))
    assert load_config("tiny.py", ["lr=1"]).lr == 1.0 and isinstance(load_config("tiny.py", ["lr=1"]).lr, float)


@pytest.mark.parametrize("override, words", [
    ("lrr=1", "unknown setting 'lrr'; did you mean lr?"), ("lr", "write --lr=VALUE"),
    ("zzz=1", "unknown setting 'zzz'; rl/config.py has them all"), ("lr=x", "lr = x: cannot be read as float"),
    ("lr='1'", "lr = '1': must be float"), ("steps=1.5", "must be int"),
    ("steps=true", "must be int"), ("steps=-1", "must be at least 0"),
    ("clip_low=2", "at least 0 and at most 1"),
    ("lora_alpha=-1.0", "above 0"), ("grad_clip=1e999", "must be above 0 and below 2**62"),
    ("dual_clip=0.2", "at least 1"),
    ("sleep_level=2", "choose one of 0, 1"),
    ("tools=1", "must be bool"), ("chat=gpt", "choose one of qwen, compact"), ("mix={}", "how many tasks"),
    ('mix={"L0": 0}', "1 or more"), ('mix={"Lo": 1}', "unknown level 'Lo'; the levels are L0"),
    ("lora_targets=()", "none given"), ("lora_targets=('in_proj_z',)", "in_proj_qkv"),
    ("dual_clip=nan", "cannot be read"), ("mix=__import__('os')", "cannot be read"), ("model_folder=x", "model"),
    ("sft_tasks=0", "needs demonstrations"), ("lr=1e999", "at most 1"), ("threads=9999999999", "at most 1024"),
    ("optimizer_steps=25", "at most tasks_per_step"),
    ("betas=(0.9,)", "give two"), ("betas=(1.0,0.9)", "below 1"), ("device=gpu", "choose one of cpu, cuda"),
    ("dtype=bfloat16", "trained in 'float32'"), ("lora_targets=(1,)", "lora_targets"), ("name=../x", "letters"),
    ("split=eval", "held out"), ("env=./mine.py", "import path"), ("samples=" + "9" * 5000, "samples"),
    ("samples=1", "at least 2"), ("betas=(0.9,True)", "betas = (0.9, True): must be tuple[float, float]"),
    ("lora_targets=q_proj", "cannot be read as tuple[str, ...]"), ("lr=" + "9" * 400, "lr = 999"),
    ("sampler=script", "of the dry run alone"), ("mix=L1", "cannot be read as dict | None, such as {'L1': 100}"),
    ("betas=1;2", "cannot be read as tuple[float, float], such as (0.9, 0.999)"),
])
def test_wrong_overrides(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config("tiny.py", [override])
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 900


def test_a_setting_that_is_no_more(tmp_path):
    """Runs that were begun with it can be used."""
    (tmp_path / "config.json").write_text(json.dumps(to_json(load_config()) | {"sft_failures": False}))
    assert from_json(read_settings(tmp_path)) == load_config()
    assert changed_settings(load_config(), tmp_path) == []


def test_wrong_files(tmp_path):
    for text, words in (("config = 3", "must set"), ("config = (", "line 1"), ("x = 1", "must set"),
                        ("from rl.config import Config\nconfig = Config(leraning=1)", "leraning"),
                        ("from rl.config import Config\nconfig = Config(steps=-1)", "steps"),
                        ("import nothing_like_this", "nothing_like_this"), ("1 / 0", "division")):
        file = tmp_path / "mine.py"
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_config(str(file))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a Python file"):
        load_config(str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match="did you mean tiny.py"):
        load_config("tinny.py")
    with pytest.raises(ConfigError, match="unknown setting 'lrate'"):
        from_json(to_json(load_config("tiny.py")) | {"lrate": 1})


@pytest.mark.parametrize("field, value, kind", [
    ("tools", "off", "bool"), ("dynamic_sampling", 1, "bool"), ("samples", 2.5, "int"), ("eval_every", True, "int"),
    ("lr", None, "float"), ("lr", True, "float"), ("dual_clip", "3", "float | None"), ("model", None, "str"),
    ("name", 7, "str"), ("architecture", "x", "dict | None"), ("mix", [("L0", 3)], "dict | None"),
    ("betas", 0.9, r"tuple\[float, float\]"), ("betas", (0.9, "0.99"), r"tuple\[float, float\]"),
    ("lora_targets", "q_proj", r"tuple\[str, ...\]"), ("lora_targets", ("q_proj", 1), r"tuple\[str, ...\]"),
    ("teacher_prices", (1, 2, None), r"tuple\[float, float, float\]"),
])
def test_types_are_those_of_the_annotations(field, value, kind):
    """In a file as on the command line: what is of another type would count as true, or fail far from here."""
    with pytest.raises(ConfigError, match=rf"^{field} = .*: must be {kind}$"):
        Config(**{"model": "somewhere", "mix": {"L1": 1}, "eval_mix": {"L1": 1}} | {field: value})


def test_an_int_may_stand_for_a_float_and_a_list_for_a_tuple():
    plain = {"model": "somewhere", "mix": {"L1": 1}, "eval_mix": {"L1": 1}}
    ours = Config(**plain, lr=1, dual_clip=3, importance_cap=None, betas=[0, 0.5], lora_targets=["q_proj"])
    assert ours == Config(**plain, lr=1.0, importance_cap=None, betas=(0.0, 0.5), lora_targets=("q_proj",))
    assert to_json(ours)["lr"].is_integer() and isinstance(ours.lr, float) and isinstance(ours.dual_clip, float)


def test_replace_checks():
    config = load_config("tiny.py")
    assert replace(config, steps=5).steps == 5 and replace(config, steps=0, samples=1).samples == 1
    with pytest.raises(ConfigError, match="did you mean steps"):
        replace(config, step=5)
