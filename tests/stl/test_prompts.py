"""The prompts say every number of a task and never its witness; the answer reader survives anything."""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stl.levels import make_task
from stl.prompts import MAX_ANSWER_CHARS, grade, read_answer, system_prompt, user_prompt
from stl.world import MAX_WAYPOINTS, Task

TASK = Task.from_json(
    {
        "id": "t",
        "workspace": [0, 0, 10, 8.5],
        "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 1]},
        "obstacles": {"W1": [4, 0, 4.2, 5]},
        "regions": {"A": [7, 1, 9, 3.25], "D": [0.1, 6, 2, 8]},
        "spec": ["F[0,30] in(A)", "G[0,30] out(D)"],
    }
)
PATH = [[0, 1, 1], [10, 3.5, 6], [20, 8, 5.5], [25, 8, 2]]


def test_user_prompt_has_the_whole_task():
    text = user_prompt(TASK)
    for part in ("[0, 0, 10, 8.5]", "0.25", "v_max = 1", "[1, 1]", "W1: [4, 0, 4.2, 5]", "D: [0.1, 6, 2, 8]"):
        assert part in text
    assert "1. F[0,30] in(A)" in text and "2. G[0,30] out(D)" in text


def test_user_prompt_never_shows_the_witness_or_the_name():
    task = make_task("L1", "eval", 0)
    assert user_prompt(task) == user_prompt(Task.from_json(task.to_json() | {"witness": None, "plan": None, "id": "x"}))


def test_user_prompt_of_an_empty_task():
    text = user_prompt(Task.from_json(TASK.to_json() | {"obstacles": {}, "regions": {}, "spec": []}))
    assert text.count("- none") == 2 and "Formulas:\nnone" in text


def test_system_prompt_with_and_without_tools():
    with_tools, without = system_prompt(), system_prompt(tools=False)
    for text in (with_tools, without):
        assert "<answer>" in text and "U[a,b]" in text
        assert not re.search(r"<answer>\s*\[\[\s*0", text)  # no solved example
    assert "plan_path" in with_tools and "check_path" in with_tools and "avoid" in with_tools
    assert "plan_path" not in without and "check_path" not in without


def test_reads_the_last_complete_block():
    first, last = "<answer>[[0,1,1]]</answer>", "<answer> [[0, 1, 1], [5, 2.5, 1]]\n</answer>"
    assert read_answer(f"{first} so: {last} done") == ([[0, 1, 1], [5, 2.5, 1]], None)
    assert read_answer(f"{last} and <answer>[[0,")[0] == [[0, 1, 1], [5, 2.5, 1]]  # the last one is cut off
    assert read_answer(f"{first} </answer>")[0] == [[0, 1, 1]]
    assert read_answer(f"<answer> {first}")[0] == [[0, 1, 1]]


BROKEN = [
    None, 7, "", "[[0,1,1]]", "</answer><answer>", "<answer>", "<answer></answer>", "<answer>[]</answer>",
    *(f"<answer>{block}</answer>" for block in (
        "[0,1,1]", "[[0,1]]", "[[0,1,1,1]]", '[["0",1,1]]', "[[true,1,1]]", "[[null,1,1]]", "{}", "1",
        '{"a":[[0,1,1]]}',         "[[NaN,1,1]]", "[[0,Infinity,1]]", "[[0,-Infinity,1]]", "[[0,1e999,1]]",
        f"[[0,{10**400},1]]", f"[[0,{'9' * 9999},1]]",
        "[[0,1,1],]", "[[0,1,1]] x", "```json\n[[0,1,1]]\n```", "__import__('os')", "[" * 100_000, '[{"a":' * 30_000,
        "[" * 60_000 + "]" * 60_000, "\ud800", "\x00", "[[0,1,1]" + ",[0,1,1]" * MAX_WAYPOINTS + "]",
        "[[0,1,1]]" + " " * MAX_ANSWER_CHARS,
    )),
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_answers_have_a_short_problem(text):
    waypoints, problem = read_answer(text)
    assert waypoints is None and 0 < len(problem) < 200 and "\n" not in problem
    verdict = grade(TASK, text)
    assert not verdict.ok and verdict.clauses is None and [v.kind for v in verdict.violations] == ["format"]


@given(st.text(alphabet="[]{},.0123456789-eE\"<>/answer NaInfity\n", max_size=300))
def test_any_text_is_read_without_an_exception(text):
    for whole in (text, f"<answer>{text}</answer>"):
        waypoints, problem = read_answer(whole)
        assert (waypoints is None) != (problem is None)
        grade(TASK, whole)


@given(st.lists(st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3), min_size=1, max_size=20))
def test_finite_waypoints_come_back_exactly(points):
    assert read_answer(f"<answer>{json.dumps(points)}</answer>") == ([list(p) for p in points], None)


def test_mutated_answers_are_graded_without_an_exception():
    chance = random.Random(0)
    good = f"<answer>{json.dumps(PATH)}</answer>"
    assert grade(TASK, good).ok
    for _ in range(500):
        text = list(good)
        for _ in range(chance.randint(1, 4)):
            text[chance.randrange(len(text))] = chance.choice('[]{},.0-9eE" <>/\\\u0661')
        grade(TASK, "".join(text))


def test_grade_judges_the_answer():
    wrong = grade(TASK, f"<answer>{json.dumps([*PATH[:2], [25, 8, 2]])}</answer>")
    assert not wrong.ok and {v.kind for v in wrong.violations} <= {"collision", "speed", "clause"}
    shifted = grade(TASK, f"<answer>{json.dumps([[0, 2, 1]])}</answer>")
    assert [v.kind for v in shifted.violations] == ["format"]
