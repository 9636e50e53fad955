"""The ladder of levels: what each promises, that witnesses are right, and that tasks never change."""

import os
import re
import subprocess
import sys
from functools import cache
from itertools import combinations

import pytest

from stl.expert import naive
from stl.levels import DISTILL_COUNTS, EVAL_COUNTS, LEVELS, RL_COUNTS, main, make_task
from stl.monitor import check
from stl.planner import plan_path
from stl.world import Task

KEY_DOOR = ("L6", "L7", "L8")
FORMS = {  # with letters for regions and without windows
    "F in(A)", "F G in(A)", "G out(A)", "out(A) U in(A)", "F in(A) | F in(A)", "F (in(A) & F in(A))", "G F in(A)",
}  # fmt: skip
SIMPLE = FORMS - {"F (in(A) & F in(A))", "G F in(A)"}
KEYS = {"out(A) U in(A)", "F in(A)", "F G in(A)"}
EXPECTED = {"L0": {"F in(A)", "G out(A)"}, "L1": {"F in(A)", "G out(A)"}, "L2": SIMPLE, "L3": FORMS, "L4": SIMPLE,
            "L5": FORMS, "L6": KEYS, "L7": KEYS, "L8": KEYS}  # fmt: skip
FORMULAS = {"L0": (2, 3), "L1": (3, 4), "L2": (3, 5), "L3": (4, 7), "L4": (3, 5), "L5": (4, 7), "L6": (2, 3),
            "L7": (4, 5), "L8": (7, 7)}  # fmt: skip


@cache
def some(level: str, count: int = 12) -> list[Task]:
    return [make_task(level, "test", i) for i in range(count)]


@pytest.mark.parametrize("level", LEVELS)
def test_the_plan_makes_the_witness_and_the_witness_is_right(level):
    for task in some(level):
        path = [[0.0, *task.robot.start]]
        for leg in task.plan:
            assert leg["t_start"] == path[-1][0]
            path += plan_path(task, path[-1][1:], **leg).waypoints[1:]
        assert path == task.witness
        assert check(task, path).ok
        assert Task.from_json(task.to_json()) == task


@pytest.mark.parametrize("level", LEVELS)
def test_names_numbers_and_sizes(level):
    for task in some(level):
        assert (task.level, task.robot.v_max) == (level, 0.5 if level in KEY_DOOR else 1.0)
        names = r"Key\d|Door\d|Goal" if level in KEY_DOOR else "[A-Z]"
        assert all(re.fullmatch(names, name) for name in task.regions)
        assert list(task.obstacles) == [f"W{i + 1}" for i in range(len(task.obstacles))]
        rects = [task.workspace, *task.obstacles.values(), *task.regions.values()]
        for x in (*task.robot.start, *(x for rect in rects for x in rect)):
            assert x >= 0 and x == round(x, 2) and round(x * 100) % 5 == 0
        for x0, y0, x1, y1 in rects:
            assert 0 <= x0 < x1 <= task.workspace.xmax and 0 <= y0 < y1 <= task.workspace.ymax
        assert FORMULAS[level][0] <= len(task.spec) <= FORMULAS[level][1]


def test_sizes_of_the_rooms_and_of_the_largest_mazes():
    for level, size, low, high in (("L0", 10, 2, 4), ("L1", 20, 3, 6), ("L2", 20, 4, 8), ("L3", 20, 4, 8)):
        for task in some(level):
            assert task.workspace == (0, 0, size, size) and low <= len(task.obstacles) <= high
    for task in some("L8"):
        assert 10 <= task.workspace.xmax <= 12.6 and 24 <= len(task.obstacles) <= 60
        assert len(task.regions) in (11, 13)


@pytest.mark.parametrize("level", LEVELS)
def test_the_forms_of_the_level_occur_and_no_others(level):
    formulas = [text for task in some(level, 60) for text in task.spec]
    found = {re.sub(r"\[.*?\]", "", re.sub(r"\((\w+)\)", "(A)", text)) for text in formulas}
    assert found == EXPECTED[level]


@pytest.mark.parametrize("level", LEVELS)
def test_the_naive_baseline_fails(level):
    tasks = some(level, 60 if level < "L4" else 12)
    paths = [naive(task) for task in tasks]
    assert sum(path is not None and check(task, path).ok for task, path in zip(tasks, paths, strict=True)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_naive_baseline_solves_at_most_5_percent_of_500(level):
    tasks = [make_task(level, "naive", i) for i in range(500)]
    assert all(check(task, task.witness).ok for task in tasks)
    assert sum((path := naive(task)) is not None and check(task, path).ok for task in tasks) <= 25


def test_small_rooms_need_waiting_and_often_avoiding():
    tasks = some("L0", 60)
    legs = [(task, leg, nxt) for task in tasks for leg, nxt in zip(task.plan, [*task.plan[1:], None], strict=True)]
    waits = [leg["hold_until"] == (nxt["t_start"] if nxt else task.witness[-1][0]) for task, leg, nxt in legs]
    assert sum(waits) >= 0.6 * len(legs)
    for task in tasks:
        holds = [leg["hold_until"] for leg in task.plan]
        assert holds == sorted(holds) and max(holds) < 100
        assert sorted(holds) == sorted(float(re.match(r"F\[(\d+),", f)[1]) for f in task.spec if f[0] == "F")
    banned = [task for task in tasks if "out" in str(task.spec)]
    assert 0.3 * len(tasks) <= len(banned) <= 0.7 * len(tasks)
    assert sum(not check(task, replay(task)).ok for task in banned) >= 0.6 * len(banned)


def replay(task: Task) -> list[list[float]]:
    """The plan without its avoid lists."""
    path = [[0.0, *task.robot.start]]
    for leg in task.plan:
        hold = leg.get("hold_until")
        found = plan_path(task, path[-1][1:], path[-1][0], leg["goal_region"], hold_until=hold)
        path += found.waypoints[1:]
    return path


@pytest.mark.parametrize("level", KEY_DOOR)
def test_doors_block_and_keys_are_nested(level):
    for task in some(level):
        needed = [name for name in task.regions if not name.startswith("Door")]
        doors = [name for name in task.regions if name.startswith("Door")]
        start, separating = task.robot.start, 0
        for door in doors:
            free = {name: plan_path(task, start, goal_region=name) for name in needed}
            kept = {name: plan_path(task, start, goal_region=name, avoid=[door]) for name in needed}
            assert any(kept[n] is None or kept[n].length > free[n].length + 0.5 for n in needed), (task.id, door)
            separating += any(path is None for path in kept.values())
        shortcuts = {"L6": (0, 0), "L7": (1, 1), "L8": (1, 2)}[level]
        assert shortcuts[0] <= len(doors) - separating <= shortcuts[1]
        behind = sum(plan_path(task, start, goal_region=n, avoid=doors) is None for n in needed if n != "Goal")
        assert behind >= {"L6": 0, "L7": 1, "L8": 2}[level] and (level > "L6" or behind == 0)
        assert plan_path(task, start, goal_region="Goal", avoid=doors) is None


def test_locked_doors_must_be_avoided_in_the_largest_mazes_even_in_the_right_order():
    assert sum(not check(task, replay(task)).ok for task in some("L8")) >= 6


@pytest.mark.parametrize("level", ("L4", "L8"))
def test_collinear_walls_are_merged(level):
    for task in some(level):
        for a, b in combinations(task.obstacles.values(), 2):
            for along, across in ((0, 1), (1, 0)):
                same_line = (a[across], a[across + 2]) == (b[across], b[across + 2])
                assert not (same_line and a[along] <= b[along + 2] and b[along] <= a[along + 2])


def test_tasks_are_the_same_everywhere():
    """A change here changes every data set: bump the data's version with it."""
    code = "from stl.levels import *; print([make_task(f'L{i}', 'eval', i).hash()[:6] for i in range(9)])"
    env = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    hashes = [make_task(level, "eval", i).hash()[:6] for i, level in enumerate(LEVELS)]
    assert done.stdout.strip() == str(hashes)
    assert hashes == ["85e812", "d119c3", "c99073", "7c7ac2", "c14605", "c541d0", "77e1e1", "2221e3", "d56fdf"]


def test_tasks_differ():
    tasks = [task for level in LEVELS for task in some(level)]
    tasks += [make_task("L1", split, i) for split in ("eval", "rl", "distill") for i in range(20)]
    assert len({task.hash() for task in tasks}) == len({task.id for task in tasks}) == len(tasks)


def test_counts_of_the_sets():
    assert [sum(counts.values()) for counts in (EVAL_COUNTS, RL_COUNTS, DISTILL_COUNTS)] == [550, 5864, 2800]
    assert list(EVAL_COUNTS) == list(RL_COUNTS) == list(DISTILL_COUNTS) == list(LEVELS[1:])


@pytest.mark.parametrize(("arguments", "words"), [
    (("L9", "eval", 0), "L0, L1"),
    (("l1", "eval", 0), "L0, L1"),
    ((1, "eval", 0), "L0, L1"),
    (("L1", "", 0), "'eval', 'rl' or 'distill'"),
    (("L1", b"eval", 0), "'eval', 'rl' or 'distill'"),
    (("L1", "eval", -1), "at least 0"),
    (("L1", "eval", 1.5), "at least 0"),
    (("L1", "eval", True), "at least 0"),
])  # fmt: skip
def test_bad_arguments_name_what_is_valid(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_task(*arguments)


def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["levels", "--stats", "2", "--level", "L6"])
    assert main() == 0
    head, row = capsys.readouterr().out.splitlines()
    cells = dict(zip(head.split(), row.split(), strict=True))
    assert cells["level"] == "L6" and cells["expert"] == "1.000"
    for bad in (["--stats", "0"], ["--stats", "x"], ["--level", "L9"]):
        monkeypatch.setattr(sys, "argv", ["levels", *bad])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
