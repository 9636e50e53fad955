"""The two tools a model may call, plan_path and check_path: their schemas, and answers that never fail.

Arguments come from a model and can be anything. Whatever they are, the answer is a readable text of bounded length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from stl.monitor import check
from stl.planner import find_path
from stl.world import Task

MAX_ARGUMENTS = 200_000  # characters of JSON
MAX_TEXT = 4_000  # characters of an answer without waypoints
MANNERS = ("strict", "friendly")


def _schema(name: str, description: str, properties: dict, required: list[str]) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _array(of: dict, description: str = "", **limits: int) -> dict:
    return {"type": "array", "items": of, **limits} | ({"description": description} if description else {})


_NUMBER = {"type": "number"}
TOOLS = [
    _schema(
        "plan_path",
        "Shortest collision-free path from a point to a region or a point at full speed. Obstacles are always kept "
        "clear of; regions (locked doors too) only if they are listed in avoid. The answer gives length, departure, "
        "arrival and the waypoints [t, x, y], or says why there is no path. Give goal_region or goal_point, not both.",
        {
            "start": _array(_NUMBER, "Where the path starts, [x, y] in metres.", minItems=2, maxItems=2),
            "t_start": _NUMBER | {"description": "Departure time in seconds."},
            "goal_region": {"type": "string", "description": "Name of the region to enter with the whole body."},
            "goal_point": _array(_NUMBER, "Point to reach, [x, y] in metres.", minItems=2, maxItems=2),
            "avoid": _array({"type": "string"}, "Names of regions that the body must not overlap on the way."),
            "hold_until": _NUMBER | {"description": "Wait at the goal until this time in seconds."},
        },
        ["start", "t_start"],
    ),
    _schema(
        "check_path",
        "Exact check of a whole path: collisions, speed, and each formula of the task. Says what fails and why.",
        {"waypoints": _array(_array(_NUMBER, minItems=3, maxItems=3), "The path, [[t, x, y], ...], from time 0 on.")},
        ["waypoints"],
    ),
]


@dataclass(frozen=True)
class ToolResult:
    """A tool's answer: the text for the model, whether it did what was asked, and the waypoints it found."""

    text: str
    ok: bool
    waypoints: list[list[float]] | None = None


def call_tool(task: Task, name: str, arguments: Mapping | str, manner: str = "strict") -> str:
    """The text of run_tool. Never raises on what a model can send."""
    return run_tool(task, name, arguments, manner).text


def run_tool(task: Task, name: str, arguments: Mapping | str, manner: str = "strict") -> ToolResult:
    """Run one tool call; a bad call is answered with a text that says what would be right.

    arguments: a mapping or its JSON text. manner: "strict", where naming an obstacle in `avoid` is an error, or
    "friendly", where it is accepted with a remark. Raises ValueError only for an unknown manner.
    """
    if manner not in MANNERS:
        raise ValueError(f"tool manner must be one of {', '.join(MANNERS)}, not {manner!r}")
    try:
        properties = _properties(name)
        arguments = _arguments(name, arguments, properties)
        result = _plan(task, arguments, manner) if name == "plan_path" else _check(task, arguments)
    except ValueError as error:
        return ToolResult(_short(f"Error: {error}"), False)
    except (ArithmeticError, LookupError, TypeError, RecursionError, MemoryError) as error:
        return ToolResult(f"Error: {name} cannot use these arguments ({type(error).__name__}).", False)
    return result


def _properties(name: object) -> dict:
    for tool in TOOLS:
        if tool["function"]["name"] == name:
            return tool["function"]["parameters"]["properties"]
    raise ValueError(f"there is no tool {str(name)[:40]!r}; the tools are plan_path and check_path")


def _arguments(name: str, arguments: object, properties: dict) -> dict:
    """The arguments as a dict of known keys; null counts as absent."""
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS:
            raise ValueError(f"the arguments have {len(arguments)} characters; at most {MAX_ARGUMENTS} are read")
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of {name} are not JSON: {arguments[:60]!r}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} must be an object with {', '.join(properties)}")
    for key in arguments:
        if key not in properties:
            near = get_close_matches(str(key)[:40], properties, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(properties)}."
            raise ValueError(f"{name} has no argument {str(key)[:40]!r}; {hint}")
    return {key: value for key, value in arguments.items() if value is not None}


def _plan(task: Task, arguments: dict, manner: str) -> ToolResult:
    for key in ("start", "t_start"):
        if key not in arguments:
            raise ValueError(f"plan_path needs {key}")
    remark = ""
    avoid = arguments.get("avoid", [])
    if manner == "friendly" and isinstance(avoid, list | tuple):
        walls = [name for name in avoid if isinstance(name, str) and name in task.obstacles]
        arguments = arguments | {"avoid": [name for name in avoid if name not in walls]}
        if walls:
            remark = f"\n{_short(', '.join(walls), 200)}: obstacles are always avoided and need not be listed."
    path, reason = find_path(task, **arguments)
    if path is None:
        return ToolResult(_short(f"No path: {reason}.{remark}"), False)
    points = path.waypoints
    lines = [f"Path found: length {path.length:.2f} m, departure {points[0][0]}, arrival {path.arrival}.",
             f"waypoints: {json.dumps(points)}"]
    if path.note:
        lines.append(path.note)
    return ToolResult("\n".join(lines) + remark, True, points)


def _check(task: Task, arguments: dict) -> ToolResult:
    if "waypoints" not in arguments:
        raise ValueError("check_path needs waypoints")
    verdict = check(task, arguments["waypoints"])
    return ToolResult(_short(verdict.text), verdict.ok)


def _short(text: str, limit: int = MAX_TEXT) -> str:
    """The text, cut at `limit` characters."""
    return text if len(text) <= limit else text[: limit - 4] + " ..."
