"""The scripted teacher, which turns a task's known plan into a tool conversation, and the naive baseline.

A task made by stl/levels.py carries its witness as legs (`task.plan`): the arguments of the plan_path calls that make
it. The teacher replays them as a good user of the tools would, so that its conversations can be imitated.
"""

import json
import random

import numpy as np

from stl.formula import In, decimal, walk
from stl.planner import plan_path
from stl.tools import ToolResult, run_tool
from stl.world import Task

Waypoints = list[list[float]]

# What the teacher says; one variant is drawn each time.
ORDER = ("I visit {}.", "The order of visits: {}.", "Going by the windows, I go to {}.",
         "A plan that fits the windows: {}.")
LEG = ("Next, the way to {}.", "Now to {}.", "The next leg goes to {}.", "From here to {}.")
FIRST_LEG = ("First, the way to {}.", "I start with {}.", "To begin: {}.")
LEAVE = (", leaving at {}", ", setting off only at {}")
KEEP_OUT = (", keeping out of {}", ", avoiding {}", ", staying clear of {}")
HOLD = (", waiting there until {}", ", staying there until {}", ", holding there until {}")
CHECK = ("Let me verify the whole path.", "Now I check the joined waypoints.", "All legs are there; I check them.")
GOOD = ("The check finds nothing wrong.", "Every formula holds.", "The path passes, so this is my answer.")
BAD = ("The check still complains; this is the best path I have.", "Not everything holds, but I answer with this path.")


def solve(task: Task, tools: bool = True, explain: str = "normal", seed: int | None = None) -> list[dict]:
    """A conversation in OpenAI form that solves `task`: assistant and tool messages, the last with the <answer>.

    explain: "normal", where each call has a sentence, worded by (task.id, seed), and the path is checked; or "plan",
    one terse line before the first call and no other words. tools=False: one message with plan and answer. ValueError
    if the task has no plan (only made tasks have one; stl/search.py solves others).
    """
    return _converse(task, task.plan, tools, explain, random.Random(f"{task.id}/{seed}"))


def demonstrate(task: Task, rng: np.random.Generator, noise: float, tools: bool = True,
                explain: str = "plan") -> list[dict]:
    """As solve, by a careless teacher who tells the right plan and, with probability `noise` each, forgets a leg's wait
    and the whole conversation's regions to keep out of. May fail the task, but always answers.
    """
    careless, legs, impatient = rng.random() < noise, [], False
    for leg in task.plan or []:
        dropped = {"t_start"} if impatient else set()  # after a wait that was forgotten it goes on at once
        impatient = rng.random() < noise
        dropped |= ({"hold_until"} if impatient else set()) | ({"avoid"} if careless else set())
        legs.append({key: value for key, value in leg.items() if key not in dropped})
    return _converse(task, legs, tools, explain, random.Random(int(rng.integers(2**32))))


def naive(task: Task) -> Waypoints | None:
    """The baseline without a plan: visit the regions named by in(.) in order of first mention, each by the shortest
    path, without waiting or avoiding anything. Waypoints [[t, x, y], ...]; None if some leg has no path.
    """
    path: Waypoints = [[0.0, *task.robot.start]]
    for region in dict.fromkeys(atom.region for tree in task.formulas for atom in walk(tree) if isinstance(atom, In)):
        leg = plan_path(task, path[-1][1:], path[-1][0], goal_region=region)
        if leg is None:
            return None
        path += leg.waypoints[1:]
    return path


def _converse(task: Task, legs: list[dict], tools: bool, explain: str, chance: random.Random) -> list[dict]:
    """Tell the task's plan and replay the legs, each from where and when the last one ended, with words in between."""
    if explain not in ("plan", "normal"):
        raise ValueError(f"explain must be plan or normal, not {explain!r}")
    if task.plan is None:
        raise ValueError(f"task {task.id!r} has no plan to demonstrate; tasks made by stl/levels.py have one")
    talks, path, messages = explain == "normal", [[0.0, *task.robot.start]], []
    order = ", then ".join(leg["goal_region"] for leg in task.plan) or "nowhere"
    words = [intro := _say(chance, ORDER, order) if talks else _plan_line(task)]
    for i, leg in enumerate(legs):
        now, *here = path[-1]
        arguments = {"start": here, "t_start": max(now, leg.get("t_start") or 0.0)}
        arguments |= {key: leg[key] for key in ("goal_region", "avoid", "hold_until") if leg.get(key)}
        if talks:
            words.append(_leg_words(arguments, LEG if i else FIRST_LEG, arguments["t_start"] > now, chance))
        found = _call(task, messages, " ".join(words), "plan_path", arguments).waypoints
        if found:  # a teacher who errs may have asked for a way that does not exist
            path += found[1:] if found[0] == path[-1] else found
        words = []
    if not tools:  # the calls served to find the path
        messages, words = [], [intro]
    elif talks:
        verdict = _call(task, messages, _say(chance, CHECK), "check_path", {"waypoints": path})
        words.append(_say(chance, GOOD if verdict.ok else BAD))
    return [*messages, {"role": "assistant", "content": "\n".join([*words, f"<answer>{json.dumps(path)}</answer>"])}]


def _call(task: Task, messages: list[dict], words: str, name: str, arguments: dict) -> ToolResult:
    """Add an assistant message with one tool call, and the tool's answer; returns the tool's result."""
    call_id = f"call_{len(messages) // 2}"
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"type": "function", "id": call_id, "function": function}
    messages.append({"role": "assistant", "content": words, "tool_calls": [call]})
    result = run_tool(task, name, arguments)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result.text})
    return result


def _plan_line(task: Task) -> str:
    """The stops with the times until which to stay, and what to avoid. The time first: a small model finds which window
    opens next, and then reads off the region that goes with it."""
    avoid = list(dict.fromkeys(name for leg in task.plan for name in leg.get("avoid") or ()))
    visits = [f"{float(leg.get('hold_until') or 0.0)} {leg['goal_region']}" for leg in task.plan]
    return "Plan: " + ", ".join(visits + (["avoid " + " ".join(avoid)] if avoid else []))


def _leg_words(leg: dict, variants: tuple[str, ...], late: bool, chance: random.Random) -> str:
    words = leg["goal_region"]
    if late:
        words += _say(chance, LEAVE, decimal(leg["t_start"]))
    if "avoid" in leg:
        words += _say(chance, KEEP_OUT, " and ".join(leg["avoid"]))
    if "hold_until" in leg:
        words += _say(chance, HOLD, decimal(leg["hold_until"]))
    return _say(chance, variants, words)


def _say(chance: random.Random, variants: tuple[str, ...], value: str = "") -> str:
    return chance.choice(variants).format(value)
