"""The scripted teacher, which turns a task's known plan into a tool conversation, and the naive baseline.

A task made by stl/levels.py carries its witness as legs (`task.plan`): the arguments of the plan_path calls that make
it. The teacher replays them as a good user of the tools would, so that its conversations can be imitated.
"""

import json
import random

import numpy as np

from stl.formula import F, G, In, Out, Until
from stl.planner import plan_path
from stl.tools import run_tool
from stl.world import Task

Waypoints = list[list[float]]


def solve(task: Task, tools: bool = True, explain: str = "normal", seed: int | None = None) -> list[dict]:
    """A conversation in OpenAI form that solves `task`: assistant and tool messages, the last with the <answer>.

    explain: "none", "normal" or "full" English, worded by (task.id, seed); "plan": one terse line before the first
    call and nothing else. tools=False: one message with the same words and the answer.
    ValueError if the task has no plan (only made tasks have one; stl/search.py solves others).
    """
    if task.plan is None:
        raise ValueError(f"task {task.id!r} has no plan to demonstrate; the expert needs a task from stl/levels.py")
    return _converse(task, task.plan, tools, explain, random.Random(f"{task.id}/{seed}"))


def demonstrate(
    task: Task, rng: np.random.Generator, noise: float, tools: bool = True, explain: str = "plan"
) -> list[dict]:
    """As solve, by a teacher who errs: with probability `noise` the order of visits is random or, equally often,
    whether to avoid each region that is not visited is a coin flip. The result may fail the task, but it answers.
    """
    if task.plan is None:
        raise ValueError(f"task {task.id!r} has no plan to demonstrate; the expert needs a task from stl/levels.py")
    legs = [dict(leg) for leg in task.plan]
    if rng.random() < noise:
        if rng.random() < 0.5:
            legs = [legs[i] for i in rng.permutation(len(legs))]
        else:
            others = [name for name in task.regions if name not in {leg.get("goal_region") for leg in legs}]
            avoid = [name for name in others if rng.random() < 0.5]
            legs = [leg | {"avoid": avoid} for leg in legs]
        legs = [{k: v for k, v in leg.items() if k != "t_start"} for leg in legs]  # the old times no longer fit
    return _converse(task, legs, tools, explain, random.Random(int(rng.integers(2**32))))


def naive(task: Task) -> Waypoints | None:
    """The baseline without a plan: visit the regions named by in(.) in order of first mention, each by the shortest
    path, without waiting or avoiding anything. Waypoints [[t, x, y], ...]; None if some leg has no path.
    """
    path: Waypoints = [[0.0, *task.robot.start]]
    for region in dict.fromkeys(name for formula in task.formulas for name in _visited(formula)):
        leg = plan_path(task, path[-1][1:], path[-1][0], goal_region=region)
        if leg is None:
            return None
        _join(path, leg.waypoints)
    return path


def _visited(formula: object) -> list[str]:
    """The regions of the in(.) atoms of a formula, in the order in which they are written."""
    if isinstance(formula, In):
        return [formula.region]
    if isinstance(formula, Out):
        return []
    if isinstance(formula, Until):
        return _visited(formula.left) + _visited(formula.right)
    parts = [formula.arg] if isinstance(formula, F | G) else formula.args
    return [name for part in parts for name in _visited(part)]


def _join(path: Waypoints, leg: Waypoints) -> None:
    """Append a leg to a path, without the waypoint at which they meet."""
    path += leg[1:] if leg and list(leg[0]) == list(path[-1]) else leg
