"""The teacher's conversations solve their tasks, are well formed and vary; the naive baseline mostly fails."""

import json

import numpy as np
import pytest

from stl.expert import demonstrate, naive, solve
from stl.levels import LEVELS, make_task
from stl.monitor import check
from stl.prompts import grade, read_answer
from stl.tools import TOOLS, call_tool
from stl.world import Task

EXPLAIN = ("plan", "normal")
KNOWN = {tool["function"]["name"] for tool in TOOLS}


def calls_of(messages):
    return [c["function"] | {"id": c["id"]} for m in messages for c in m.get("tool_calls", [])]


def assert_well_formed(task, messages):
    """Assistant with one call, its tool answer, ..., a final assistant with the answer; all as JSON."""
    assert json.loads(json.dumps(messages)) == messages
    assert [m["role"] for m in messages] == ["assistant", "tool"] * (len(messages) // 2) + ["assistant"]
    assert "tool_calls" not in messages[-1] and "<answer>" in messages[-1]["content"]
    calls = calls_of(messages)
    assert len({c["id"] for c in calls}) == len(calls) and {c["name"] for c in calls} <= KNOWN
    for said, heard, call in zip(messages[::2], messages[1::2], calls, strict=False):
        assert set(said) == {"role", "content", "tool_calls"} and "<answer>" not in said["content"]
        assert heard["tool_call_id"] == call["id"]
        assert heard["content"] == call_tool(task, call["name"], json.loads(call["arguments"]))


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_level_in_every_manner(level):
    for index in range(4):
        task = make_task(level, "eval", index)
        for explain in EXPLAIN:
            messages = solve(task, explain=explain)
            assert_well_formed(task, messages)
            assert grade(task, messages[-1]["content"]).ok
            assert read_answer(messages[-1]["content"])[0] == task.witness
            (alone,) = solve(task, tools=False, explain=explain)
            assert read_answer(alone["content"])[0] == task.witness and "tool_calls" not in alone


def test_legs_are_asked_for_as_the_plan_has_them():
    task = make_task("L1", "eval", 1)
    calls = [json.loads(c["arguments"]) for c in calls_of(solve(task, explain="plan"))]
    assert [c["goal_region"] for c in calls] == [leg["goal_region"] for leg in task.plan]
    assert [c.get("avoid", []) for c in calls] == [leg.get("avoid", []) for leg in task.plan]
    assert calls[0]["start"] == list(task.robot.start) and calls[0]["t_start"] == 0
    assert all("goal_point" not in c for c in calls)


def test_plan_line_is_terse_and_other_words_are_absent():
    task = Task.from_json({
        "id": "p", "workspace": [0, 0, 10, 10], "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 1]},
        "obstacles": {}, "regions": {"A": [8, 8, 9, 9], "B": [1, 8, 2, 9], "C": [8, 1, 9, 2], "D": [4, 4, 5, 5]},
        "plan": [{"goal_region": "A", "t_start": 0.0, "hold_until": 12.5, "avoid": ["B"]},
                 {"goal_region": "C", "t_start": 12.5, "avoid": ["B", "D"]}],
    })  # fmt: skip
    messages = solve(task, explain="plan")
    assert messages[0]["content"] == "Plan: 12.5 A, 0.0 C, avoid B D"
    assert all(m["content"] == "" for m in messages[2:-1:2]) and messages[-1]["content"].startswith("<answer>")
    assert solve(task, tools=False, explain="plan")[0]["content"].startswith("Plan: 12.5 A, 0.0 C, avoid B D\n<answer>")


def test_words_vary_with_seed_and_repeat_without():
    task = make_task("L3", "eval", 0)
    texts = {json.dumps(solve(task, seed=seed)) for seed in range(20)}
    assert len(texts) == 20
    assert solve(task, seed=3) == solve(task, seed=3)
    words = {e: sum(len(m["content"]) for m in solve(task, explain=e)[:-1:2]) for e in EXPLAIN}
    assert 0 < words["plan"] < words["normal"]
    checks = {e: sum(c["name"] == "check_path" for c in calls_of(solve(task, explain=e))) for e in EXPLAIN}
    assert checks == {"plan": 0, "normal": 1}


def test_noisy_demonstrations_err_at_the_asked_rate_and_always_answer():
    solved = {0.0: 0, 1.0: 0}
    for index in range(40):
        task = make_task("L0", "train", index)
        for noise in solved:
            messages = demonstrate(task, np.random.default_rng(index), noise)
            assert_well_formed(task, messages)
            assert messages == demonstrate(task, np.random.default_rng(index), noise)
            solved[noise] += grade(task, messages[-1]["content"]).ok
    assert solved[0.0] == 40 and 0 < solved[1.0] < 35
    (alone,) = demonstrate(task, np.random.default_rng(0), 1.0, tools=False)
    assert read_answer(alone["content"])[0] is not None


def test_a_way_that_does_not_exist_is_left_out_of_the_answer():
    task = Task.from_json({
        "id": "ring", "workspace": [0, 0, 10, 10], "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 1]},
        "obstacles": {}, "regions": {"Door": [3, 0, 4, 10], "A": [8, 8, 9, 9], "B": [1, 8, 2, 9]},
        "plan": [{"goal_region": "A", "avoid": ["Door"]}, {"goal_region": "B", "t_start": 2, "hold_until": 20}],
    })  # fmt: skip
    messages = solve(task)
    assert messages[1]["content"].startswith("No path")
    path = read_answer(messages[-1]["content"])[0]
    assert path[0] == [0, 1, 1] and path[1] == [2, 1, 1] and path[-1][0] == 20 and check(task, path).ok


def test_without_a_plan_a_clear_line():
    data = make_task("L1", "eval", 0).to_json()
    with pytest.raises(ValueError, match="has no plan"):
        solve(Task.from_json({k: v for k, v in data.items() if k not in ("plan", "witness")}))
    with pytest.raises(ValueError, match="explain must be plan or normal"):
        solve(make_task("L1", "eval", 0), explain="loud")


def test_naive_visits_in_order_of_mention_and_returns_none_without_a_way():
    data = {
        "id": "n", "workspace": [0, 0, 10, 10], "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 1]},
        "obstacles": {"W1": [6, 0, 6.5, 10]}, "regions": {"A": [3, 3, 4, 4], "B": [1, 8, 2, 9], "C": [8, 8, 9, 9]},
        "spec": ["out(C) U[0,30] in(B)", "F[0,40] (in(A) & F[0,30] in(B))"],
    }  # fmt: skip
    task = Task.from_json(data)
    path = naive(task)
    assert path[0] == [0, 1, 1] and 1.25 <= path[1][1] <= 1.75 and 3.25 <= path[-1][1] <= 3.75  # B, then A
    assert [v.kind for v in check(task, path).violations] == ["clause"]  # in A, B is only past
    assert naive(Task.from_json(data | {"spec": ["F[0,40] in(C)"]})) is None
    assert naive(Task.from_json(data | {"spec": []})) == [[0, 1, 1]]


def test_naive_fails_most_tasks():
    tasks = [make_task(level, "eval", index) for level in ("L0", "L1", "L6") for index in range(20)]
    paths = [(task, naive(task)) for task in tasks]
    assert sum(path is not None and check(task, path).ok for task, path in paths) <= 9
