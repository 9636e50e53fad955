"""Task sets: the stream of training tasks, the held-out set, the sets as files, the demonstrations and their cache."""
import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl import cli, stl_env
from rl import tasks as tasks_module
from rl.env import STL, EnvFault
from rl.tasks import (
    SETS,
    demonstrations,
    held_out,
    main,
    make_sets,
    named_tasks,
    proportional,
    reserved,
    robot_of,
    training_tasks,
)
from stl.expert import solve
from stl.levels import LEVELS, make_task
from stl.prompts import grade
from stl.world import Task

MIXES = st.dictionaries(st.sampled_from(LEVELS), st.integers(1, 12), min_size=1, max_size=4)


@pytest.fixture
def named(monkeypatch):
    """make_task that only names its task."""
    monkeypatch.setattr(stl_env, "make_task", lambda *key: key)


@given(mix=MIXES, seed=st.integers(0, 2**62), n=st.integers(1, 9))
def test_each_epoch_has_each_task_once(mix, seed, n):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stl_env, "make_task", lambda *key: key)
        settings, size = config(mix=mix, seed=seed), sum(mix.values())
        drawn = [task for step in range(3 * size // n + 1) for task in training_tasks(settings, step, n)]
        everything = {(level, "rl", index) for level, count in mix.items() for index in range(count)}
        for epoch in range(3):
            assert set(drawn[epoch * size:(epoch + 1) * size]) == everything
        reverse = config(mix=dict(reversed(mix.items())), seed=seed)
        assert training_tasks(settings, 2, n) == training_tasks(reverse, 2, n)


def test_epochs_and_seeds_shuffle_differently(named):
    one, other = config(mix={"L0": 50}), config(mix={"L0": 50}, seed=1)
    assert training_tasks(one, 0, 50) != training_tasks(one, 1, 50) != training_tasks(other, 1, 50)
    assert len(training_tasks(config(mix={"L0": 2}), 0, 7)) == 7


def test_held_out_is_the_front_of_the_evaluation_set(named):
    assert held_out({"L1": 1, "L0": 2}) == [("L0", "eval", 0), ("L0", "eval", 1), ("L1", "eval", 0)]


def test_held_out_tasks_are_made_once():
    first, again = held_out({"L0": 2}), held_out({"L0": 3})
    assert first[0] is again[0] and first[1] is again[1] and first[0] == make_task("L0", "eval", 0)


def sets_in(folder, sets):
    """The tasks of the files, compared with their manifest and with tasks made one by one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == sorted([*(f"{s}.jsonl" for s in sets), "manifest.json"])
    tasks = []
    for split, counts in sets.items():
        text, said = (folder / f"{split}.jsonl").read_bytes(), manifest["sets"][split]
        some = [Task.from_json(json.loads(line)) for line in text.splitlines()]
        assert Counter(task.level for task in some) == counts == said["levels"] and said["tasks"] == len(some)
        assert said["sha256"] == hashlib.sha256(text).hexdigest()
        assert some[-1] == make_task(some[-1].level, split, counts[some[-1].level] - 1)
        tasks += some
    assert manifest["tasks"] == len(tasks) and manifest["version"] >= 1
    return tasks


def test_sets_share_no_task(tmp_path):
    sets = {split: {level: 25 if level < "L8" else 8 for level in counts} for split, counts in SETS.items()}
    make_sets(tmp_path, sets)
    assert len({task.hash() for task in sets_in(tmp_path, sets)}) == 3 * (7 * 25 + 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_full_sets_share_no_task_and_the_expert_solves_each(tmp_path):
    assert main(["--make", "--out", str(tmp_path / "made")]) == 0
    tasks = sets_in(tmp_path / "made", SETS)
    assert len({task.hash() for task in tasks}) == len(tasks) == 550 + 5864 + 2800
    failed = [task.id for task in tasks if not grade(task, solve(task)[-1]["content"]).ok]
    assert not failed


def test_a_task_in_two_sets_is_an_error_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks_module, "make_task", lambda level, split, index: make_task(level, "same", index))
    with pytest.raises(RuntimeError, match="'rl', 0"):
        make_sets(tmp_path, {"eval": {"L0": 1}, "rl": {"L0": 2}})
    assert not list(tmp_path.iterdir())


def test_making_the_sets_is_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks_module, "SETS", {"eval": {"L0": 2}})
    assert main(["--make", "--out", str(tmp_path / "new" / "data")]) == 0
    assert "eval.jsonl: 2 tasks" in capsys.readouterr().out
    assert [task.id for task in sets_in(tmp_path / "new" / "data", {"eval": {"L0": 2}})] == ["L0-eval-0", "L0-eval-1"]
    (tmp_path / "file").touch()
    assert main(["--make", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@given(mix=MIXES, count=st.integers(0, 200))
def test_proportions(mix, count):
    levels = Counter(proportional(mix, count))
    total = sum(mix.values())
    assert sum(levels.values()) == count and all(abs(levels[lv] - count * mix[lv] / total) < 1 for lv in mix)


def config(**changes):
    values = {"env": STL, "seed": 0, "split": "rl", "mix": {"L0": 1}, "sft_noise": 0.0, "tools": True}
    return SimpleNamespace(**values | {"chat": "compact"} | changes)


def test_demonstrations_solve_their_tasks(tmp_path):
    made = demonstrations(config(mix={"L0": 3, "L1": 1}), 8, tmp_path)
    tasks = [Task.from_json(item["task"]) for item in made]
    assert Counter(task.level for task in tasks) == {"L0": 6, "L1": 2}
    assert len({task.hash() for task in tasks}) == 8
    for task, item in zip(tasks, made, strict=True):
        assert grade(task, item["messages"][-1]["content"]).ok
        assert item["messages"][0]["content"].startswith("Plan: ") and item["messages"][1]["role"] == "tool"


def test_noise_tools_and_words_are_settings(tmp_path):
    noisy = demonstrations(config(sft_noise=1.0), 12, tmp_path)
    failed = sum(not grade(Task.from_json(item["task"]), item["messages"][-1]["content"]).ok for item in noisy)
    assert failed > 0
    silent = demonstrations(config(tools=False), 2, tmp_path)
    assert all(len(item["messages"]) == 1 for item in silent)
    worded = demonstrations(config(chat="qwen"), 2, tmp_path)
    assert "Plan: " not in worded[0]["messages"][0]["content"]


def test_demonstrations_are_made_once(tmp_path, monkeypatch):
    made = demonstrations(config(), 3, tmp_path)
    (path,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tasks_module, "_make", lambda *_: pytest.fail("made again"))
        assert demonstrations(config(), 3, tmp_path) == made
        for changed in (config(seed=1), config(sft_noise=0.5), config(mix={"L1": 1})):
            with pytest.raises(pytest.fail.Exception):
                demonstrations(changed, 3, tmp_path)
    path.unlink()
    path.with_suffix(".99.tmp").write_text("half a file")  # of a killed process: it never counts
    assert demonstrations(config(), 3, tmp_path) == made


def test_several_processes_make_the_same(tmp_path, monkeypatch):
    alone = demonstrations(config(sft_noise=0.5), 6, tmp_path / "alone")
    monkeypatch.setattr(tasks_module, "CHUNK", 2)
    monkeypatch.setattr(tasks_module, "cores", lambda: 2)
    assert demonstrations(config(sft_noise=0.5), 6, tmp_path / "together") == alone
    assert all(json.loads(line) for path in tmp_path.glob("*/*.jsonl") for line in path.read_text().splitlines())


def test_what_cannot_be_kept_is_not_made(tmp_path):
    (tmp_path / "file").touch()
    for ask in (lambda: demonstrations(config(), 3, tmp_path / "file"),
                lambda: named_tasks("sft:L0=2", tmp_path / "file" / "data")):
        with pytest.raises(cli.UsageError, match="file.*, where .* are kept: cannot be written"):
            ask()


def test_tasks_to_keep_out_are_those_with_the_same_robot(tmp_path, monkeypatch):
    few = {level: 2 for level in LEVELS[1:]}
    monkeypatch.setattr(tasks_module, "SETS", {"eval": few, "rl": few | {"L8": 1}})
    robots = {}
    for level in LEVELS:
        pairs = {robot_of(make_task(level, split, i).to_json()) for split in ("eval", "rl", "sft") for i in range(6)}
        assert len(pairs) == 1, "the robot of a level is always the same"
        robots.setdefault(pairs.pop(), set()).add(level)
    assert robots == {(0.2, 1.0): {"L0"}, (0.3, 1.0): set(LEVELS[1:6]), (0.2, 0.5): set(LEVELS[6:])}
    every = reserved(robots, tmp_path / "all")
    for robot, levels in robots.items():
        assert reserved({robot}, tmp_path) == {
            digest: name for digest, name in every.items() if name.partition("-")[0] in levels}
    assert reserved(robots, tmp_path) == every and len(every) == 31
    assert len(list(tmp_path.glob("tasks-of-L*"))) == len(LEVELS) - 1


def test_a_fault_in_a_worker_is_told(monkeypatch):
    monkeypatch.setattr(tasks_module, "CHUNK", 2)
    monkeypatch.setattr(tasks_module, "cores", lambda: 2)
    with pytest.raises(RuntimeError, match="things: Traceback(.|\n)*the JSON object must be str"):
        list(tasks_module._make(json.loads, [("no text",)] * 6, "things"))


def test_a_fault_of_a_world_in_a_worker_is_one_line(monkeypatch):
    monkeypatch.setattr(tasks_module, "CHUNK", 2)
    monkeypatch.setattr(tasks_module, "cores", lambda: 2)
    settings = {"env": STL, "seed": 0, "noise": 0.0, "tools": True, "explain": "plan"}
    with pytest.raises(EnvFault, match=r"make_task raised ValueError: [^\n]*; asked for .'L99', 'sft', 0.$"):
        tasks_module._make(tasks_module._demonstrate, [("L99", 0, settings)] * 6, "things")


INTERRUPTED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
print("imported", flush=True)
from rl import cli, tasks

class Workers(tasks.Workers):
    def collect(self, block):
        os.killpg(0, signal.SIGINT)
        time.sleep(60)

tasks.Workers, tasks.cores = Workers, lambda: 2
if __name__ == "__main__":
    sys.exit(cli.run_script("x.py", lambda: tasks.named_tasks("sft:L0=200")))
"""


def test_ctrl_c_while_workers_start_is_one_line(tmp_path):
    """It goes to the whole process group. The script, which imports torch, is not imported by its workers."""
    (tmp_path / "x.py").write_text(INTERRUPTED.format(root=str(Path(__file__).resolve().parents[2])))
    done = subprocess.run([sys.executable, "x.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100,
                          start_new_session=True)
    assert done.returncode == 1 and done.stdout == "imported\n" and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.replace("\r", "\n").rstrip().endswith("\nx.py: interrupted")


def test_a_name_that_is_there_twice_in_a_file_of_tasks_is_refused(tmp_path):
    line = json.dumps(make_task("L0", "sft", 0).to_json())
    (tmp_path / "t.jsonl").write_text(f"{line}\n" + line.replace('"B": [', '"A": [') + "\n")
    with pytest.raises(cli.UsageError, match="t.jsonl, line 2: .*A.* is there twice; names must be unique"):
        named_tasks(str(tmp_path / "t.jsonl"))
