"""Tasks: a map of axis-aligned rectangles, a square robot, and the formulas its path must satisfy; JSON in and out.

docs/task.json is one; the class Task has its fields. Metres, seconds, m/s. Everything is checked when a task is loaded,
so that the rest of stl/ need not check again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stl.formula import NAME, Formula, FormulaError, brief, nearest, parse, walk

MAX_RECTS = 1000  # obstacles, and regions
MAX_FORMULAS = 100
MAX_NODES = 2000  # operators and atoms of all formulas together
MAX_WAYPOINTS = 10_000
LIMIT = 1e6  # of a coordinate, size or speed: beyond it doubles are too coarse for the 1e-6 of slack
_REQUIRED = ("id", "workspace", "robot", "obstacles", "regions")
# what may be absent; after the plan, what files of cases carry beside the task, which is not read
_OPTIONAL = ("spec", "level", "witness", "plan", "tags", "target", "avoid", "length", "path", "tol")


class TaskError(ValueError):
    """A task that cannot be loaded; one line names the field, what is wrong and what would be right."""


class Rect(NamedTuple):
    """A rectangle [xmin, xmax] x [ymin, ymax] in metres."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float

    def grown(self, by: float) -> Rect:
        """The rectangle with each side moved outwards (inwards if negative) by `by` metres; may become empty."""
        return Rect(self.xmin - by, self.ymin - by, self.xmax + by, self.ymax + by)


@dataclass(frozen=True)
class Robot:
    """A square of half-width `half_width` that translates at no more than `v_max`, starting at `start`."""

    half_width: float
    v_max: float
    start: tuple[float, float]


@dataclass(frozen=True)
class Task:
    """A planning task. `witness` is a known solution [[t, x, y], ...] and `plan` the plan_path calls that make it."""

    id: str
    workspace: Rect
    robot: Robot
    obstacles: dict[str, Rect]
    regions: dict[str, Rect]
    spec: tuple[str, ...] = ()
    level: str | None = None
    witness: list[list[float]] | None = None
    plan: list[dict] | None = None

    @cached_property
    def formulas(self) -> tuple[Formula, ...]:
        """The parsed spec. Raises FormulaError."""
        return tuple(parse(text, self.regions) for text in self.spec)

    @cached_property
    def cache(self) -> dict:
        """Room for what the monitor prepares once per task."""
        return {}

    @classmethod
    def from_json(cls, data: object) -> Task:
        """Load and check a task. Raises TaskError, naming the field."""
        _check_keys("task", data, _REQUIRED, _OPTIONAL)
        robot, plan = data["robot"], data.get("plan")
        _check_keys("robot", robot, ("half_width", "v_max", "start"))
        obstacles, regions = _rects("obstacles", data["obstacles"]), _rects("regions", data["regions"])
        if both := obstacles.keys() & regions.keys():
            raise TaskError(f"regions: {min(both)!r} is also the name of an obstacle; names must be unique")
        if plan is not None and not (isinstance(plan, list) and all(isinstance(leg, dict) for leg in plan)):
            raise TaskError(f"plan: expected a list of objects, the arguments of plan_path; found {brief(plan)}")
        half_width = _number("robot.half_width", robot["half_width"], above=0.0)
        v_max = _number("robot.v_max", robot["v_max"], above=0.0)
        return cls(
            id=_text("id", data["id"]),
            workspace=_rect("workspace", data["workspace"]),
            robot=Robot(half_width, v_max, tuple(_numbers("robot.start", robot["start"], ("x", "y")))),
            obstacles=obstacles,
            regions=regions,
            spec=_spec(data.get("spec", []), regions),
            level=None if data.get("level") is None else _text("level", data["level"]),
            witness=None if data.get("witness") is None else _witness(data["witness"]),
            plan=plan,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Task:
        """Load a task from a JSON file. Raises TaskError."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique))
        except TaskError as error:
            raise TaskError(f"{path}: {error}") from None
        except OSError as error:
            raise TaskError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}: is not JSON ({str(error)[:100]})") from None

    def to_json(self) -> dict:
        """The task as `from_json` reads it; what is absent is left out."""
        half_width, v_max = _plain((self.robot.half_width, self.robot.v_max))
        data = {
            "id": self.id,
            "workspace": _plain(self.workspace),
            "robot": {"half_width": half_width, "v_max": v_max, "start": _plain(self.robot.start)},
            "obstacles": {name: _plain(rect) for name, rect in self.obstacles.items()},
            "regions": {name: _plain(rect) for name, rect in self.regions.items()},
            "spec": list(self.spec),
        }
        extras = {"level": self.level, "witness": self.witness, "plan": self.plan}
        return data | {key: value for key, value in extras.items() if value is not None}

    def hash(self) -> str:
        """Hex sha256 of the map, the robot and the formulas: equal for tasks that differ in name or order alone."""
        data = self.to_json()
        content = {key: data[key] for key in ("workspace", "robot", "obstacles", "regions")}
        content["spec"] = sorted(map(str, self.formulas))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def unique(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object, unless it has a name twice, of which json would keep the last one without a word."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise TaskError(f"{brief(max(names, key=names.count))} is there twice; names must be unique")
    return dict(pairs)


def _plain(values: Iterable[float]) -> list[float | int]:
    return [int(v) if v == int(v) else float(v) for v in values]


def _check_keys(field: str, data: object, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(data, Mapping):
        raise TaskError(f"{field}: expected an object with {', '.join(required)}; found {brief(data)}")
    for key in data:
        if key not in required + optional and not (isinstance(key, str) and key.startswith("_")):
            raise TaskError(f"{field}: unknown key {brief(key)}{nearest(key, required + optional)}")
    if missing := [key for key in required if key not in data]:
        raise TaskError(f"{field}: {missing[0]!r} is missing; expected {', '.join(required)}")


def _text(field: str, value: object) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= 200):
        raise TaskError(f"{field}: expected a text of 1 to 200 characters; found {brief(value)}")
    return value


def _number(field: str, value: object, above: float = -LIMIT) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= LIMIT:
        raise TaskError(f"{field}: expected a number above {above:g} and at most {LIMIT:g}; found {brief(value)}")
    return float(value)


def _numbers(field: str, value: object, names: tuple[str, ...]) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != len(names):
        raise TaskError(f"{field}: expected [{', '.join(names)}]; found {brief(value)}")
    return [_number(f"{field}[{i}]", v) for i, v in enumerate(value)]


def _rect(field: str, value: object) -> Rect:
    rect = Rect(*_numbers(field, value, Rect._fields))
    if not (rect.xmin < rect.xmax and rect.ymin < rect.ymax):
        raise TaskError(f"{field}: expected xmin < xmax and ymin < ymax; found {brief(value)}")
    return rect


def _rects(field: str, value: object) -> dict[str, Rect]:
    if not isinstance(value, Mapping) or len(value) > MAX_RECTS:
        raise TaskError(f"{field}: expected an object of at most {MAX_RECTS} named rectangles; found {brief(value)}")
    for name in value:
        if not (isinstance(name, str) and re.fullmatch(NAME, name)):
            raise TaskError(f"{field}: a name is 1 to 64 letters, digits, '_', '-' or '.'; found {brief(name)}")
    return {name: _rect(f"{field}.{name}", rect) for name, rect in value.items()}


def _spec(value: object, regions: Mapping[str, Rect]) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_FORMULAS:
        raise TaskError(f"spec: expected a list of at most {MAX_FORMULAS} formulas; found {brief(value)}")
    nodes = 0
    for i, text in enumerate(value):
        try:
            nodes += sum(1 for _ in walk(parse(text, regions)))
        except FormulaError as error:
            raise TaskError(f"spec[{i}]: {error}") from None
    if nodes > MAX_NODES:
        raise TaskError(f"spec: {nodes} operators and atoms in all; at most {MAX_NODES} are allowed")
    return tuple(value)


def _witness(value: object) -> list[list[float]]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_WAYPOINTS:
        raise TaskError(f"witness: expected a list of 1 to {MAX_WAYPOINTS} waypoints [t, x, y]; found {brief(value)}")
    return [_numbers(f"witness[{i}]", point, ("t", "x", "y")) for i, point in enumerate(value)]
