"""Tasks: JSON in and out, and one clear line for every kind of broken file."""

import copy
import json
import random
from pathlib import Path

import pytest

from stl.world import Rect, Task, TaskError

CASES = Path(__file__).parents[1] / "cases"
GOOD = {
    "id": "demo",
    "workspace": [0, 0, 10, 10],
    "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 1]},
    "obstacles": {"W1": [4, 0, 5, 6.5]},
    "regions": {"A": [7, 7, 9, 9], "Door1": [4, 6.5, 5, 10]},
    "spec": ["F[0,30] in(A)", "out(Door1) U[0,20] in(A)"],
}


def changed(path, value):
    data = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    inner = data
    for key in parents:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = value
    return data


def test_round_trip():
    lines = [line for name in ("stl", "plan") for line in (CASES / f"{name}.jsonl").read_text().splitlines()]
    for case in map(json.loads, lines):
        task = Task.from_json(case.get("task", case))
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert Task.from_json(GOOD).to_json() == GOOD
    extra = GOOD | {"level": "L1", "witness": [[0, 1, 1], [2, 1, 1.5]], "plan": [{"goal_region": "A"}]}
    assert Task.from_json(extra).to_json() == extra
    bare = Task.from_json({key: value for key, value in GOOD.items() if key != "spec"} | {"_note": "mine"})
    assert bare.spec == () and bare.level is None and bare.witness is None and bare.plan is None


def test_from_file(tmp_path):
    path = tmp_path / "task.json"
    path.write_text(json.dumps(GOOD))
    assert Task.from_file(path) == Task.from_json(GOOD)
    for text, words in (("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ("[]", "expected an object"), ("", "JSON")):
        path.write_text(text)
        with pytest.raises(TaskError, match=words) as caught:
            Task.from_file(path)
        assert str(path) in str(caught.value)
    path.write_text(json.dumps(GOOD).replace('"W1": ', '"W1": [2, 2, 3, 3], "W1": '))  # json would drop the first wall
    with pytest.raises(TaskError, match="'W1' is there twice; names must be unique"):
        Task.from_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    for broken in (path, tmp_path / "missing.json", tmp_path):
        with pytest.raises(TaskError):
            Task.from_file(broken)


def test_formulas_are_parsed_once_and_tasks_compare_by_content():
    task = Task.from_json(GOOD)
    assert task.formulas is task.formulas and len(task.formulas) == 2
    assert task == Task.from_json(copy.deepcopy(GOOD))


def test_hash_covers_the_content_alone():
    base = Task.from_json(GOOD).hash()
    same = [
        GOOD | {"id": "other", "level": "L3", "witness": [[0, 1, 1]], "plan": []},
        GOOD | {"spec": GOOD["spec"][::-1]},
        GOOD | {"regions": dict(reversed(GOOD["regions"].items()))},
        changed("spec/0", "F[0,30.0]  (in(A))"),
        changed("workspace/2", 10.0),
    ]
    other = [
        changed("spec/0", "F[0,31] in(A)"),
        changed("robot/v_max", 1.5),
        changed("robot/start/0", 1.5),
        changed("obstacles/W1/0", 4.5),
        changed("workspace/2", 11),
    ]
    assert {Task.from_json(data).hash() for data in same} == {base}
    assert base not in {Task.from_json(data).hash() for data in other}


@pytest.mark.parametrize("key", ["id", "workspace", "robot", "obstacles", "regions"])
def test_missing_keys_are_named(key):
    with pytest.raises(TaskError, match=f"'{key}' is missing"):
        Task.from_json({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("id", 7, "id: expected a text"),
        ("workspace", [0, 0, 10], "workspace: expected [xmin, ymin, xmax, ymax]"),
        ("workspace", "0 0 10 10", "workspace"),
        ("workspace", [0, 0, 0, 10], "xmin < xmax"),
        ("workspace/1", True, "workspace[1]: expected a number"),
        ("workspace/1", "0", "workspace[1]: expected a number"),
        ("workspace/1", float("nan"), "workspace[1]: expected a number"),
        ("workspace/2", float("inf"), "workspace[2]: expected a number"),
        ("workspace/2", [10**5000], "workspace[2]: expected a number"),
        ("workspace/2", 10**400, "at most 1e+06"),
        ("robot", [0.25, 1], "robot: expected an object"),
        ("robot", {"half_width": 1, "v_max": 1}, "'start' is missing"),
        ("robot/halfwidth", 1, "did you mean 'half_width'"),
        ("robot/half_width", 0, "robot.half_width: expected a number above 0"),
        ("robot/half_width", -1, "robot.half_width"),
        ("robot/v_max", 0, "robot.v_max: expected a number above 0"),
        ("robot/start", [1, 2, 3], "robot.start: expected [x, y]"),
        ("obstacles", [], "obstacles: expected an object"),
        ("obstacles/W1", [4, 0, 4, 6], "obstacles.W1: expected xmin < xmax"),
        ("obstacles/W 1", [4, 0, 5, 6], "a name is 1 to 64 letters"),
        ("obstacles/W\n", [4, 0, 5, 6], "a name is 1 to 64 letters"),
        ("obstacles/A", [4, 0, 5, 6], "'A' is also the name of an obstacle"),
        ("obstacles", {f"W{i}": [0, 0, 1, 1] for i in range(2000)}, "at most 1000"),
        ("regions/A", None, "regions.A"),
        ("spec", "F[0,1] in(A)", "spec: expected a list"),
        ("spec/1", "F[0,1] in(B)", "spec[1]: formula 'F[0,1] in(B)': unknown region 'B'"),
        ("spec/1", 3, "spec[1]: a formula must be a string"),
        ("spec", ["in(A)"] * 101, "at most 100"),
        ("spec", [" & ".join(["in(A)"] * 400)] * 10, "at most 2000"),
        ("spec", ["(" * 2000], "spec[0]"),
        ("specs", [], "did you mean 'spec'"),
        ("level", 1, "level: expected a text"),
        ("witness", [[0, 1]], "witness[0]: expected [t, x, y]"),
        ("witness", [], "witness: expected a list"),
        ("plan", {"goal_region": "A"}, "plan: expected a list"),
    ],
)
def test_errors_name_the_field(path, value, words):
    with pytest.raises(TaskError) as caught:
        Task.from_json(changed(path, value))
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 500


def test_a_start_that_collides_and_an_empty_spec_load():
    assert Task.from_json(changed("robot/start", [4.5, 3])).robot.start == (4.5, 3.0)
    assert Task.from_json(changed("robot/start", [-5, 3]) | {"spec": []}).formulas == ()
    assert Rect(0, 0, 2, 1).grown(-0.5) == (0.5, 0.5, 1.5, 0.5)


JUNK = [None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "in(A)", "x" * 10**5, [], [[]], {}, {"a": 1}]


def broken(value, rng):
    """A copy of a JSON value with one place, anywhere in it, replaced by junk, deleted, or repeated very often."""
    if rng.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return rng.choice(JUNK)
    value = copy.copy(value)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.2:
        many = {f"{key}{i}": value[key] for i in range(3000)} if isinstance(value, dict) else [value[key]] * 3000
        value = many
    else:
        value[key] = broken(value[key], rng)
    return value


def test_a_thousand_broken_tasks():
    rng = random.Random(0)
    refused = 0
    for _ in range(1000):
        try:
            Task.from_json(broken(GOOD, rng))
        except TaskError as error:
            refused += 1
            assert len(str(error)) < 1000
    assert refused > 700  # some changes do no harm
