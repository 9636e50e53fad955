"""The two tools a model may call, plan_path and check_path: their schemas, and answers that never fail.

Arguments come from a model and can be anything. Whatever they are, the answer is a readable text of bounded length.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from stl.formula import cut, nearest
from stl.monitor import check
from stl.planner import find_path
from stl.world import Task

MAX_TEXT = 4_000  # characters of an answer without waypoints
MANNERS = ("strict", "friendly")


def _schema(name: str, description: str, properties: dict, required: list[str]) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _array(description: str, of: dict, **limits: int) -> dict:
    return {"type": "array", "description": description, "items": of, **limits}


_NUMBER = {"type": "number"}
TOOLS = [
    _schema(
        "plan_path",
        "Shortest collision-free path from a point to a region or a point at full speed. Obstacles are always kept "
        "clear of; regions (locked doors too) only if they are listed in avoid. The answer gives length, departure, "
        "arrival and the waypoints [t, x, y], or says why there is no path. Give goal_region or goal_point, not both.",
        {
            "start": _array("Where the path starts, [x, y] in metres.", _NUMBER, minItems=2, maxItems=2),
            "t_start": _NUMBER | {"description": "Departure time in seconds."},
            "goal_region": {"type": "string", "description": "Name of the region to enter with the whole body."},
            "goal_point": _array("Point to reach, [x, y] in metres.", _NUMBER, minItems=2, maxItems=2),
            "avoid": _array("Names of regions that the body must not overlap on the way.", {"type": "string"}),
            "hold_until": _NUMBER | {"description": "Wait at the goal until this time in seconds."},
        },
        ["start", "t_start"],
    ),
    _schema(
        "check_path",
        "Exact check of a whole path: collisions, speed, and each formula of the task. Says what fails and why.",
        {"waypoints": _array("The path, [[t, x, y], ...], from time 0 on.",
                             {"type": "array", "items": _NUMBER, "minItems": 3, "maxItems": 3})},
        ["waypoints"],
    ),
]


@dataclass(frozen=True)
class ToolResult:
    """A tool's answer: the text for the model, whether it did what was asked, and the waypoints it found."""

    text: str
    ok: bool
    waypoints: list[list[float]] | None = None


def call_tool(task: Task, name: str, arguments: Mapping, manner: str = "strict") -> str:
    """The text of run_tool. Never raises on what a model can send."""
    return run_tool(task, name, arguments, manner).text


def run_tool(task: Task, name: str, arguments: Mapping, manner: str = "strict") -> ToolResult:
    """Run one tool call; a bad call is answered with a text that says what would be right.

    manner: "strict", where naming an obstacle in `avoid` is an error, or "friendly", where it is accepted with a
    remark. Raises ValueError only for an unknown manner.
    """
    if manner not in MANNERS:
        raise ValueError(f"tool manner must be one of {', '.join(MANNERS)}, not {manner!r}")
    try:
        arguments = _arguments(name, arguments)
        if name == "plan_path":
            return _plan(task, arguments, manner)
        verdict = check(task, arguments["waypoints"])
        return ToolResult(verdict.text, verdict.ok)
    except ValueError as error:
        return ToolResult(cut(f"Error: {error}", MAX_TEXT), False)
    except (ArithmeticError, LookupError, TypeError, RecursionError, MemoryError) as error:
        return ToolResult(f"Error: {name} cannot use these arguments ({type(error).__name__}).", False)


def _arguments(name: str, arguments: object) -> dict:
    """The arguments as a dict of known keys; null counts as absent. Raises ValueError."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    if not isinstance(name, str) or name not in schemas:
        raise ValueError(f"there is no tool {str(name)[:40]!r}; the tools are {' and '.join(schemas)}")
    known = schemas[name]["properties"]
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} must be an object with {', '.join(known)}")
    for key in arguments:
        if key not in known:
            hint = nearest(key, known) or f"; it takes {', '.join(known)}"
            raise ValueError(f"{name} has no argument {str(key)[:40]!r}{hint}")
    arguments = {key: value for key, value in arguments.items() if value is not None}
    for key in schemas[name]["required"]:
        if key not in arguments:
            raise ValueError(f"{name} needs {key}")
    return arguments


def _plan(task: Task, arguments: dict, manner: str) -> ToolResult:
    remark, avoid = "", arguments.get("avoid", [])
    if manner == "friendly" and isinstance(avoid, list | tuple):
        walls = [name for name in avoid if isinstance(name, str) and name in task.obstacles]
        arguments = arguments | {"avoid": [name for name in avoid if name not in walls]}
        if walls:
            remark = f"\n{cut(', '.join(walls), 200)}: obstacles are always avoided and need not be listed."
    path, reason = find_path(task, **arguments)
    if path is None:
        return ToolResult(cut(f"No path: {reason}.{remark}", MAX_TEXT), False)
    points = path.waypoints
    text = f"Path found: length {path.length:.2f} m, departure {points[0][0]}, arrival {path.arrival}.\n"
    text += f"waypoints: {json.dumps(points)}" + (f"\n{path.note}" if path.note else "")
    return ToolResult(text + remark, True, points)
