"""How a policy uses the tools: counts over an episode's calls, for reports, and the way that led to each call."""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rl.chat import read_calls
from rl.episode import Episode
from stl.formula import In, Out, Until
from stl.monitor import SLACK, clip, shape_problem
from stl.world import Task

HABITS = {  # count: (what its share says, the count that it is a share of)
    "answered": ("episodes that end with an answer", "episodes"),
    "by_name": ("paths asked for to a region by name", "paths"),
    "kept_out": ("paths that keep out of every locked door", "locked"),
    "repeated": ("calls repeated within the episode", "calls"),
    "errors": ("calls answered by an error", "calls"),
}
LATE = 1.0  # seconds by which a model may round the time at which it goes on


@dataclass
class Use:
    """One tool call of an episode: its turn (from 0), what was asked and answered, the path that the answer or, for
    check_path, the question holds ([] if none), and the number of the call whose path it goes on from."""

    turn: int
    name: str
    arguments: dict
    answer: str
    path: list[list[float]]
    after: int | None = None


def uses(episode: Episode) -> list[Use]:
    """The tool calls of an episode in order, each with the text that answered it ("" if it ended before, but an error
    if the arguments, then {}, are not a JSON object).

    A plan_path call goes on from the latest earlier one whose path ends where and when it starts: within the robot's
    half-width and no later than one second after the asked time, as models round. A call that starts elsewhere, for
    example anew at time 0, goes on from none.
    """
    found: list[Use] = []
    turn, waiting = -1, []
    for message in episode.messages:
        if message["role"] == "assistant":
            turn += 1
            waiting = []
            for call in read_calls(message):
                waiting.append(Use(turn, call.name, call.arguments, "Error: cannot be read" if call.error else "", []))
            found += waiting
        elif message["role"] == "tool" and waiting:
            waiting.pop(0).answer = message["content"]
    for i, use in enumerate(found if isinstance(episode.task, Task) else ()):
        use.path = _path(use)
        if use.name == "plan_path":
            use.after = next((j for j in reversed(range(i)) if _goes_on(episode.task, found[j], use)), None)
    return found


def _path(use: Use) -> list[list[float]]:
    path, (head, found, rest) = use.arguments.get("waypoints"), use.answer.partition("\nwaypoints: ")
    if found and head.startswith("Path found"):  # only the tool writes this
        path = json.loads(rest.partition("\n")[0])
    return [] if shape_problem(path) else path


def _goes_on(task: Task, earlier: Use, use: Use) -> bool:
    start, when = use.arguments.get("start"), use.arguments.get("t_start")
    if earlier.name != "plan_path" or not earlier.path:
        return False
    if not isinstance(start, list) or shape_problem([[when, *start]]):
        return False
    t, *place = earlier.path[-1]
    return t <= when + LATE and max(abs(a - b) for a, b in zip(place, start, strict=True)) <= task.robot.half_width


def count(episode: Episode) -> dict[str, int]:
    """What HABITS are made of, for one episode; sums over episodes keep their meaning.

    "episodes": 1. "answered": it ended with an answer, right or not. "calls": of any tool, those cut off or not run
    too. "repeated": calls with the name and arguments of an earlier one. "errors": answers that begin with "Error", and
    calls whose arguments cannot be read, answered or not.
    "paths": calls of plan_path. "by_name": those whose goal_region is a region of the task. "locked": those made while
    some door is locked. "kept_out": those of "locked" whose `avoid` lists every door that is.

    A door D is what a formula out(D) U[a,b] in(K) speaks of, and locked until the body has been fully inside its key K
    on the path so far: the path of the call that this one goes on from, of the one before, and so on (see uses).
    """
    found, task = uses(episode), episode.task
    made = [(use.name, json.dumps(use.arguments, sort_keys=True)) for use in found]
    counts = {"episodes": 1, "answered": int(episode.ending == "answer"), "calls": len(found),
              "repeated": len(made) - len(set(made)), "errors": sum(use.answer.startswith("Error") for use in found),
              "paths": 0, "by_name": 0, "locked": 0, "kept_out": 0}
    doors = keys(task)
    collected: list[set[str]] = []  # by the end of each call's path
    for use in found:
        before = set() if use.after is None else collected[use.after]
        collected.append(before | _visited(task, use.path, doors.values()))
        if use.name == "plan_path" and isinstance(task, Task):
            goal, avoid = use.arguments.get("goal_region"), use.arguments.get("avoid")
            locked = {door for door, key in doors.items() if key not in before}
            counts["paths"] += 1
            counts["by_name"] += isinstance(goal, str) and goal in task.regions
            counts["locked"] += bool(locked)
            counts["kept_out"] += bool(locked) and isinstance(avoid, list) and all(door in avoid for door in locked)
    return counts


def shares(counts: dict[str, int]) -> dict[str, str]:
    """The shares of HABITS in words, from sums of `count`; without those of which there was nothing to count, such as
    paths in another world."""
    return {words: f"{counts.get(name, 0) / counts[of]:.1%} of {counts[of]}"
            for name, (words, of) in HABITS.items() if counts.get(of)}


def keys(task: Task) -> dict[str, str]:
    """The key region of each door of the task, see count; none for a task of another world."""
    return {f.left.region: f.right.region for f in (task.formulas if isinstance(task, Task) else ())
            if isinstance(f, Until) and isinstance(f.left, Out) and isinstance(f.right, In)}


def _visited(task: Task, path: list[list[float]], names: Iterable[str]) -> set[str]:
    """Those of the regions in which the body is fully inside at some moment of the path."""
    names = sorted(set(names))
    if not path or not names:
        return set()
    rects = np.array([task.regions[name].grown(SLACK - task.robot.half_width) for name in names], dtype=float).T
    rects[:, (rects[0] > rects[2]) | (rects[1] > rects[3])] = np.nan  # smaller than the body
    with np.errstate(all="ignore"):
        lo, hi = clip(rects, np.array([path[0], *path], dtype=float))  # at least one segment
    inside = ((lo <= hi) & (lo <= 1) & (hi >= 0)).any(axis=1)
    return {name for name, found in zip(names, inside, strict=True) if found}
