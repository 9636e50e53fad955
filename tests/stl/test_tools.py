"""The tools answer whatever they are asked, and never raise on what a model can send."""

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stl.monitor import check
from stl.planner import plan_path
from stl.tools import MANNERS, MAX_TEXT, TOOLS, call_tool, run_tool
from stl.world import Task

TASK = Task.from_json({
    "id": "tools", "workspace": [0, 0, 10, 10], "robot": {"half_width": 0.2, "v_max": 0.5, "start": [1, 1]},
    "obstacles": {"W1": [3, 0, 3.5, 7], "W2": [6, 3, 6.5, 10]},
    "regions": {"A": [4, 4, 5, 5], "Goal": [8, 8, 9, 9], "Door1": [3, 7, 3.5, 10]},
    "spec": ["F[0,60] in(Goal)", "out(Door1) U[0,40] in(A)"]})
START = {"start": [1, 1], "t_start": 0}


def test_schemas_are_openai_functions():
    names = [tool["function"]["name"] for tool in TOOLS]
    assert names == ["plan_path", "check_path"]
    for tool in json.loads(json.dumps(TOOLS)):
        parameters = tool["function"]["parameters"]
        assert tool["type"] == "function" and parameters["type"] == "object"
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert all("description" in part for part in parameters["properties"].values())


def test_a_found_path_is_in_the_text_as_the_answer_needs_it():
    arguments = START | {"goal_region": "Goal"}
    result = run_tool(TASK, "plan_path", arguments)
    path = plan_path(TASK, [1, 1], goal_region="Goal")
    assert result.ok and result.waypoints == path.waypoints
    assert json.dumps(path.waypoints) in result.text
    assert f"arrival {path.arrival}" in result.text and "departure 0.0" in result.text
    assert result.text == call_tool(TASK, "plan_path", arguments)


def test_null_means_absent():
    arguments = START | {"goal_region": "Goal", "goal_point": None, "avoid": None, "hold_until": None}
    assert run_tool(TASK, "plan_path", arguments).ok


def test_no_path_says_why():
    result = run_tool(TASK, "plan_path", START | {"goal_region": "Goal", "avoid": ["Door1"]})
    assert not result.ok and result.waypoints is None
    assert result.text.startswith("No path:") and "Door1" in result.text


def test_a_hold_before_the_arrival_is_said():
    assert "before the arrival" in call_tool(TASK, "plan_path", START | {"goal_region": "Goal", "hold_until": 1})


def test_strict_lists_the_valid_regions():
    text = call_tool(TASK, "plan_path", START | {"goal_region": "Goal", "avoid": ["W1"]})
    assert text.startswith("Error:") and "A, Goal, Door1" in text and "obstacle" in text


def test_friendly_accepts_walls():
    arguments = START | {"goal_region": "A", "avoid": ["W1", "W2", "Goal"]}
    result = run_tool(TASK, "plan_path", arguments, "friendly")
    assert result.ok and "always avoided" in result.text
    assert result.waypoints == plan_path(TASK, [1, 1], goal_region="A", avoid=["Goal"]).waypoints
    arguments["avoid"].append("Nowhere")
    assert call_tool(TASK, "plan_path", arguments, "friendly").startswith("Error:")


def test_an_unknown_manner_is_the_callers_mistake():
    with pytest.raises(ValueError, match="strict, friendly"):
        run_tool(TASK, "plan_path", START, "rude")


def test_check_path_is_the_checker():
    path = plan_path(TASK, [1, 1], goal_region="Goal").waypoints
    result = run_tool(TASK, "check_path", {"waypoints": path})
    assert result.text == check(TASK, path).text and not result.ok
    path = [*plan_path(TASK, [1, 1], goal_region="A").waypoints]
    assert not run_tool(TASK, "check_path", {"waypoints": [[0, 1, 1], [1, 9, 9]]}).ok


@pytest.mark.parametrize("name, arguments, word", [
    ("fly", {}, "no tool"),
    (None, {}, "no tool"),
    ("plan_path", '{"start": [1, 1]}', "object"),
    ("plan_path", [1], "object"),
    ("plan_path", 3, "object"),
    ("plan_path", {}, "needs start"),
    ("plan_path", {"start": [1, 1]}, "needs t_start"),
    ("plan_path", START | {"goal": "A"}, "no argument 'goal'"),
    ("plan_path", START | {"goal_regions": "A"}, "did you mean 'goal_region"),
    ("plan_path", START | {"goal_region": "A", "t_start": math.nan}, "t_start"),
    ("plan_path", START | {"goal_region": "A", "start": [True, 1]}, "x of start"),
    ("check_path", {}, "needs waypoints"),
    ("check_path", {"waypoint": []}, "did you mean 'waypoints"),
])
def test_bad_calls_are_answered(name, arguments, word):
    text = call_tool(TASK, name, arguments)
    assert text.startswith("Error:") and word in text and len(text) < 500 and "\n" not in text


NAMES = st.sampled_from([*TASK.regions, *TASK.obstacles, "door1", "", "x" * 5000, "\ud800", "A\n"])
NUMBERS = st.one_of(st.floats(), st.integers(), st.integers(-(10**400), 10**400), st.sampled_from([1, 4.5, 8.5, 1e308]))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, NAMES, st.text(max_size=20))
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=5), v), max_leaves=8)
POINTS = st.one_of(st.just([1, 1]), st.lists(NUMBERS, min_size=2, max_size=2), VALUES)
PATHS = st.lists(st.lists(NUMBERS, min_size=3, max_size=3), max_size=30) | st.lists(VALUES, max_size=5) | VALUES
ARGUMENTS = st.fixed_dictionaries({}, optional={
    "start": POINTS, "t_start": st.one_of(st.just(0), LEAVES), "goal_region": st.one_of(NAMES, VALUES),
    "goal_point": POINTS, "avoid": st.one_of(st.lists(NAMES, max_size=5), VALUES), "hold_until": LEAVES,
    "waypoints": PATHS, "extra": VALUES})
CALLS = st.one_of(ARGUMENTS, ARGUMENTS.map(repr), VALUES, st.binary(max_size=9))


ANY_CALL = given(st.one_of(st.sampled_from(["plan_path", "check_path"]), VALUES), CALLS, st.sampled_from(MANNERS))
UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def answered(name, arguments, manner):
    began = time.process_time()
    result = run_tool(TASK, name, arguments, manner)
    assert isinstance(result.text, str) and result.text
    assert len(result.text) <= MAX_TEXT or result.waypoints
    assert time.process_time() - began < 1
    if result.waypoints:
        assert json.loads(json.dumps(result.waypoints)) == result.waypoints


@settings(max_examples=300, **UNHURRIED)
@ANY_CALL
def test_nothing_escapes(name, arguments, manner):
    answered(name, arguments, manner)


@pytest.mark.slow
@settings(max_examples=5000, **UNHURRIED)
@ANY_CALL
def test_nothing_escapes_long(name, arguments, manner):
    answered(name, arguments, manner)


def test_the_answer_on_a_huge_path_is_bounded():
    path = [[i / 10, (i * 7) % 11, (i * 5) % 13] for i in range(5_000)]
    assert len(call_tool(TASK, "check_path", {"waypoints": path})) <= MAX_TEXT
