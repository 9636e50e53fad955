"""The solver without a witness: it solves made tasks, benchmarks and tasks built to need one trick each."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stl.levels import make_task
from stl.monitor import check
from stl.search import search
from stl.world import Task

PAPER = [p for p in sorted((Path(__file__).parent.parent / "cases" / "paper").glob("*.json")) if "path" not in p.name]
SHORT = [(f"L{level}", index) for level in range(1, 9) for index in range(3)]
FULL = [pytest.param(f"L{level}", index, marks=pytest.mark.slow) for level in range(1, 9) for index in range(3, 100)]
REGIONS = {"A": [8, 0, 9, 1], "B": [8, 8, 9, 9], "C": [0, 8, 1, 9], "Mid": [3, 0, 4, 6]}


def make(*spec, obstacles=(), start=(0.5, 0.5)):
    return Task.from_json({
        "id": "search", "workspace": [0, 0, 10, 10], "robot": {"half_width": 0.2, "v_max": 1, "start": list(start)},
        "obstacles": {f"W{i}": list(box) for i, box in enumerate(obstacles)}, "regions": REGIONS, "spec": list(spec)})


@pytest.mark.parametrize("level, index", [*SHORT, *FULL])
def test_made_tasks(level, index):
    task = replace(make_task(level, "search", index), witness=None, plan=None)
    path, reason = search(task)
    assert path, reason
    assert check(task, path).ok


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_benchmarks(path):
    task = Task.from_json(json.loads(path.read_text()))
    path, reason = search(task)
    assert path, reason
    assert check(task, path).ok


@pytest.mark.parametrize("spec", [
    (),
    ("F[30,40] in(A)",),
    ("F[30,40] G[0,9] in(A)", "F[0,15] in(C)"),
    ("F[0,50] (in(A) & F[20,22] in(B))",),
    ("G[0,60] F[0,25] in(A)", "F[20,40] in(B)"),
    ("out(Mid) U[0,40] in(C)", "F[0,60] in(A)"),
    ("G[0,30] out(Mid)", "F[0,40] in(A)"),
    ("G[0,20] out(A)", "F[0,40] in(A)"),  # the region itself is forbidden at first: come later
    ("F[0,5] in(B) | F[10,20] in(C)", "F[22,30] in(B)"),  # only the second choice can be reached in time
    ("F[5,15] in(A) | F[6,16] in(A)", "G[0,60] out(C)"),
    ("G[25,40] in(B)", "F[0,12] in(A)"),
    ("(out(A) & out(B)) U[0,20] in(C)", "F[0,60] in(A)", "F[0,60] in(B)"),
    ("G[0,40] (out(A) | F[0,10] in(B))", "F[0,20] in(A)"),
])
def test_tricks(spec):
    task = make(*spec)
    path, reason = search(task)
    assert path, reason
    assert check(task, path).ok


def test_waiting_behind_a_region_that_opens_later():
    # Mid and the walls cut the room; Mid may be entered from 30 s on.
    task = make("G[0,30] out(Mid)", "F[0,60] in(A)", obstacles=[(3, 6, 4, 10)])
    assert check(task, search(task)[0]).ok


@pytest.mark.parametrize("task, word", [
    (make("F[0,3] in(A)"), "no path found among"),
    (make("F[0,90] in(A)", "G[0,100] out(A)"), "no path found"),
    (make("F[0,90] in(A)", obstacles=[(7, 0, 7.5, 10)]), "no path found"),
    (make("F[0,90] in(A)", obstacles=[(0, 0, 2, 2)]), "the start collides"),
])
def test_nothing_found_is_said(task, word):
    found, reason = search(task, 5)
    assert found is None and word in reason


def test_the_time_limit_is_kept():
    began = time.monotonic()
    found, reason = search(make_task("L8", "search", 0), 0.0)
    assert found is None and "time limit" in reason
    assert time.monotonic() - began < 5
