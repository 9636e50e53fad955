"""Tool habits on episodes by hand, in a hall with two doors and their keys, with counts that a reader can check."""
import json

import pytest

from rl.episode import Episode
from rl.habits import count, keys, shares, uses
from stl.world import Task

# Along a hall 20 m long: start 1, Key1 4..6, Door1 8..9, Key2 11..13, Door2 15..16, Goal 17..19; the body is 0.5 wide
TASK = Task.from_json({
    "id": "hall", "level": "L6", "workspace": [0, 0, 20, 4], "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 2]},
    "obstacles": {}, "regions": {"Key1": [4, 1, 6, 3], "Door1": [8, 0, 9, 4], "Key2": [11, 1, 13, 3],
                                 "Door2": [15, 0, 16, 4], "Goal": [17, 1, 19, 3]},
    "spec": ["out(Door1) U[0,60] in(Key1)", "out(Door2) U[0,90] in(Key2)", "F[0,99] in(Goal)", "G[0,9] out(Goal)"]})
LEG1, LEG2, LEG3 = [[0.0, 1, 2], [4.0, 5, 2]], [[4.0, 5, 2], [11.0, 12, 2]], [[11.0, 12, 2], [17.0, 18, 2]]


def plan(start, t_start, avoid=(), answer=None, **goal) -> tuple[dict, str]:
    text = answer if isinstance(answer, str) else f"Path found: length 1 m.\nwaypoints: {json.dumps(answer)}\nremark"
    return {"name": "plan_path", "arguments": {"start": start, "t_start": t_start, "avoid": list(avoid)} | goal}, text


def episode(*turns: list[tuple[dict, str]], task=TASK, ending: str = "answer") -> Episode:
    """An episode whose turns make these calls with these answers; None: not answered."""
    made = Episode(task, seed=0)
    for turn in turns:
        calls = [{"type": "function", "id": f"call_{i}", "function": {"name": call["name"], "arguments": json.dumps(
            call["arguments"])}} for i, (call, _) in enumerate(turn)]
        made.messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        made.messages += [{"role": "tool", "content": text} for _, text in turn if text is not None]
    made.end(ending)
    return made


def counts(*turns, **options) -> dict:
    return count(episode(*turns, **options))


def test_doors_and_their_keys():
    assert keys(TASK) == {"Door1": "Key1", "Door2": "Key2"}


def test_a_careful_episode():
    """Every call names a region and lists what is still locked; at the third call nothing is."""
    found = counts([plan([1, 2], 0, ["Door2", "Door1"], LEG1, goal_region="Key1")],
                   [plan([5, 2], 4, ["Door2"], LEG2, goal_region="Key2")],
                   [plan([12, 2], 11, [], LEG3, goal_region="Goal")],
                   [({"name": "check_path", "arguments": {"waypoints": LEG1 + LEG2[1:] + LEG3[1:]}}, "Correct")])
    assert found == {"episodes": 1, "answered": 1, "calls": 4, "paths": 3, "by_name": 3, "locked": 2, "kept_out": 2,
                     "repeated": 0, "errors": 0}


def test_a_careless_episode():
    """Call 1 forgets Door2. Call 2 repeats it, after which Key1 is still not collected on the way to its start. Call 3
    goes on from call 1 by a point and lists the wrong door. The last one is an error and has no answer behind it."""
    first = plan([1, 2], 0, ["Door1"], LEG1, goal_region="Key1")
    found = counts([first, first], [plan([5, 2], 4, ["Door1"], LEG2, goal_point=[12, 2])],
                   [plan([12, 2], 11, "Door9", "Error: avoid must be a list", goal_region="Nowhere")],
                   [({"name": "?", "arguments": {}}, None)], ending="turns")
    assert found == {"episodes": 1, "answered": 0, "calls": 5, "paths": 4, "by_name": 2, "locked": 3, "kept_out": 0,
                     "repeated": 1, "errors": 1}


def test_keys_of_a_discarded_attempt_do_not_count():
    """The second call starts anew at time 0, so that Key1 of the first is not collected; the third goes on from it."""
    turns = [[plan([1, 2], 0, ["Door1", "Door2"], LEG1, goal_region="Key1")],
             [plan([1, 2], 0, ["Door2"], [[0.0, 1, 2], [11.0, 12, 2]], goal_region="Key2")],
             [plan([12, 2], 11, [], LEG3, goal_region="Goal")]]
    assert [use.after for use in uses(episode(*turns))] == [None, None, 1]
    # the straight way to Key2 leads through Key1, so that at the third call both are collected
    assert {name: counts(*turns)[name] for name in ("locked", "kept_out")} == {"locked": 2, "kept_out": 1}


@pytest.mark.parametrize("start, when, after", [
    ([5, 2], 4, 0), ([5.2, 2], 3.5, 0), ([5, 2], 30, 0),  # rounded, or after a wait
    ([5.3, 2], 4, None), ([5, 2], 2.9, None), ([5, "2"], 4, None), (None, 4, None), ([5, 2], None, None)])
def test_what_a_call_goes_on_from(start, when, after):
    found = uses(episode([plan([1, 2], 0, (), LEG1, goal_region="Key1")], [plan(start, when, (), LEG2)]))
    assert found[1].after == after and found[1].path == LEG2 and found[1].turn == 1


def test_hostile_arguments_are_counted_and_nothing_else():
    strange = [{"waypoints": "x"}, {"waypoints": [[float("nan"), 0, 0]]},
               {"goal_region": ["Key1"], "avoid": [["a"], 3]}]
    found = counts([({"name": "plan_path", "arguments": made}, "Path found?") for made in strange[2:]]
                   + [({"name": "check_path", "arguments": made}, "Error: no\nwaypoints: [[") for made in strange[:2]])
    assert (found["calls"], found["paths"], found["by_name"], found["kept_out"], found["errors"]) == (3, 1, 0, 0, 2)


@pytest.mark.parametrize("arguments", ['{"start": [1,', "null", "[1, 2]", "{'start': 1}", "[" * 990 + "]" * 990,
                                       '{"a": ' + "[" * 60 + "]" * 60 + "}", {"start": [1, 2]}])
def test_a_call_that_cannot_be_read_is_one_answered_by_an_error(arguments):
    """With its answer, and without one, as where a turn was cut within a call."""
    for answer in ("Error: the arguments are not a JSON object.", None):
        made = episode([({"name": "plan_path", "arguments": {}}, answer)])
        made.messages[0]["tool_calls"][0]["function"]["arguments"] = arguments
        assert [use.arguments for use in uses(made)] == [{}]
        assert {name: count(made)[name] for name in ("calls", "errors", "paths", "by_name")} == {
            "calls": 1, "errors": 1, "paths": 1, "by_name": 0}


def test_other_worlds_have_calls_but_neither_paths_nor_doors():
    found = counts([({"name": "plan_path", "arguments": {"goal_region": "A"}}, "Error: x")], task=object())
    assert (found["calls"], found["errors"], found["paths"], found["locked"]) == (1, 1, 0, 0)


def test_shares_in_words():
    words = shares({"episodes": 4, "answered": 3, "paths": 0, "calls": 8, "errors": 2, "repeated": 0})
    assert words["episodes that end with an answer"] == "75.0% of 4"
    assert words["calls answered by an error"] == "25.0% of 8"
    assert list(words) == ["episodes that end with an answer", "calls repeated within the episode",
                           "calls answered by an error"]  # and nothing of paths and doors, of which there are none
