"""The ladder of levels: make_task(level, split, index) draws a task path first, the same one on every machine.

A map is drawn, then an order of visits with waits and keep-out regions; plan_path makes the path of that plan, and only
then are formulas derived from the path's actual times. So each task has a known solution: `witness`, the joined
waypoints, and `plan`, the plan_path calls that make them.

    python -m stl.levels --stats 200        # what the levels are like, 200 draws each
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from stl import expert, mazes
from stl.monitor import check
from stl.planner import plan_path
from stl.world import Robot, Task

LEVELS = tuple(f"L{i}" for i in range(9))
EVAL_COUNTS = {"L1": 50, "L2": 50, "L3": 50, "L4": 50, "L5": 50, "L6": 50, "L7": 50, "L8": 200}
RL_COUNTS = {"L1": 44, "L2": 133, "L3": 888, "L4": 44, "L5": 888, "L6": 44, "L7": 891, "L8": 2932}
DISTILL_COUNTS = {"L1": 21, "L2": 64, "L3": 424, "L4": 21, "L5": 424, "L6": 21, "L7": 425, "L8": 1400}
TRIES = 1000


class _Redraw(Exception):
    """This draw came to nothing; the next one of the same stream is taken."""


def make_task(level: str, split: str, index: int) -> Task:
    """Task number `index` (0, 1, ...) of a split ("eval", "rl", "distill", or any other name, each its own stream).

    The evaluation set is "eval" 0..49 (0..199 of L8). Raises ValueError for an unknown level or a bad split or index.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: the levels are {', '.join(LEVELS)}")
    if not isinstance(split, str) or not split:
        raise ValueError(f"split must be a name such as 'eval', 'rl' or 'distill', not {split!r}")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ValueError(f"index must be a whole number of at least 0, not {index!r}")
    name = f"{level}-{split}-{index}"
    rng = Random(int.from_bytes(hashlib.sha256(name.encode()).digest()))
    for _ in range(TRIES):
        try:
            return _draw(rng, level, name)
        except _Redraw:
            continue
    raise RuntimeError(f"{name}: no task in {TRIES} draws")  # each draw succeeds with a probability of 1/10 or more


def _draw(rng: Random, level: str, name: str) -> Task:
    draft = (_timed if level in _TIMED else _key_doors)(rng, level)
    rng.shuffle(draft.spec)
    task = replace(draft.task, id=name, level=level, spec=tuple(draft.spec), witness=draft.path, plan=draft.plan)
    if not check(task, task.witness).ok:
        raise _Redraw
    if rng.random() < 0.95:  # most draws that the naive baseline solves are drawn again
        path = expert.naive(task)
        if path is not None and check(task, path).ok:
            raise _Redraw
    return task


@dataclass
class Leg:
    """A leg as it happened, in seconds: it began, reached the region, was to wait until `hold`, and was over."""

    region: str
    depart: float
    arrive: float
    hold: int | None
    leave: float


class Draft:
    """A path that grows leg by leg on a map without formulas, and the formulas that it will satisfy."""

    def __init__(self, drawn: mazes.Map, v_max: float):
        obstacles = {name: mazes.rect(box) for name, box in drawn.obstacles.items()}
        regions = {name: mazes.rect(box) for name, box in sorted(drawn.regions.items())}
        robot = Robot(drawn.half_width / 100, v_max, (drawn.start[0] / 100, drawn.start[1] / 100))
        self.task = Task("draft", mazes.rect((0, 0, drawn.size, drawn.size)), robot, obstacles, regions)
        self.path: list[list[float]] = [[0.0, *robot.start]]
        self.plan: list[dict] = []
        self.legs: list[Leg] = []
        self.spec: list[str] = []

    def go(self, region: str, avoid: set[str], hold: Callable[[float, float], int | None]) -> Leg:
        """Append the leg to `region`; `hold` turns departure and arrival into the time until which to stay there."""
        depart, *here = self.path[-1]
        found = plan_path(self.task, here, depart, goal_region=region, avoid=sorted(avoid))
        if found is None:
            raise _Redraw
        arrive, x, y = found.waypoints[-1]
        until = hold(depart, arrive)
        self.plan.append({"goal_region": region, "t_start": depart, "avoid": sorted(avoid)})
        self.path += found.waypoints[1:]
        if until is not None:
            self.plan[-1]["hold_until"] = float(until)
            if until > arrive:
                self.path.append([float(until), x, y])
        self.legs.append(Leg(region, depart, arrive, until, self.path[-1][0]))
        return self.legs[-1]


# ---- L0 to L5: timed visits, with regions to keep out of


@dataclass(frozen=True)
class Timed:
    """How tasks of one level are drawn. Pairs are ranges, in seconds where they are times."""

    draw_map: Callable[[Random, list[int], list[int]], mazes.Map | None]  # (rng, order of regions, hops with a hazard)
    forms: tuple[str, ...]  # of the clauses that make the robot go somewhere, to choose from
    visits: tuple[int, int]  # how many of them
    hazards: tuple[int, int]  # how many regions to keep out of
    wait: tuple[int, int]
    slack: tuple[int, int]
    formulas: tuple[int, int]
    plain: bool = False  # hazards are forbidden at all times, and the order of visits is that of their windows' starts


def _room(obstacles: tuple[int, int], size=2000, half_width=30, boxes=(150, 400), sides=(150, 350)):
    return lambda rng, order, hops: mazes.room(
        rng, size, half_width, rng.randint(*obstacles), boxes, sides, order, hops
    )


def _maze(side: tuple[int, int], cell: tuple[int, int]):
    return lambda rng, order, hops: mazes.maze(
        rng, rng.randint(*side), 10 * rng.randint(*cell), 20, 30, 0.25, order, hops
    )


_SIMPLE = ("visit", "visit", "hold", "hold", "until", "choice")
_RICH = ("visit", "hold", "until", "choice", "sequence", "sequence", "patrol")
_VISITS = ("visit",) * 3
_SMALL = _room((2, 4), 1000, 20, (80, 200), (100, 200))
_TIMED = {
    "L0": Timed(_SMALL, _VISITS, (2, 3), (0, 1), (1, 9), (3, 9), (2, 3), plain=True),
    "L1": Timed(_room((3, 6)), _VISITS, (2, 3), (1, 1), (2, 15), (3, 20), (3, 4), plain=True),
    "L2": Timed(_room((4, 8)), _SIMPLE, (2, 4), (1, 2), (2, 15), (5, 25), (3, 5)),
    "L3": Timed(_room((4, 8)), _RICH, (3, 5), (1, 2), (2, 15), (1, 5), (4, 7)),
    "L4": Timed(_maze((4, 6), (34, 40)), _SIMPLE, (2, 4), (1, 2), (2, 20), (5, 30), (3, 5)),
    "L5": Timed(_maze((5, 7), (28, 34)), _RICH, (3, 5), (1, 2), (2, 20), (1, 6), (4, 7)),
}


@dataclass
class Stop:
    """A visit that is planned: its region, what it is for, and how long to wait before and during it (seconds)."""

    region: str
    form: str
    wait: int | None
    dwell: int


@dataclass
class KeepOut:
    """A region that legs first..last avoid; with `until`, as long as stop `last` has not been reached."""

    region: str
    first: int
    last: int
    until: bool


def _timed(rng: Random, level: str) -> Draft:
    kind = _TIMED[level]
    n_hazards = rng.randint(*kind.hazards)
    forms = rng.sample(kind.forms, min(rng.randint(*kind.visits), kind.formulas[1] - n_hazards))
    order, forms = _order(rng, forms)
    hops = sorted(rng.sample(range(len(order)), n_hazards))
    drawn = kind.draw_map(rng, order, hops)
    if drawn is None:
        raise _Redraw
    names = list(drawn.regions)
    stops = [Stop(names[i], form, None if rng.random() < 0.25 else rng.randint(*kind.wait), rng.randint(3, 10))
             for i, form in zip(order, forms, strict=True)]
    keep_out = _keep_out(rng, kind, stops, dict(zip(names[max(order) + 1 :], hops, strict=True)))
    draft = Draft(drawn, 1.0)
    for k, stop in enumerate(stops):
        avoid = {entry.region for entry in keep_out if entry.first <= k <= entry.last}
        draft.go(stop.region, avoid, lambda depart, arrive, stop=stop: _stay(rng, kind, stop, depart, arrive))
    draft.spec += [_keep_out_clause(rng, kind, entry, draft.legs) for entry in keep_out]
    draft.spec += _visit_clauses(rng, kind, stops, draft)
    if not kind.formulas[0] <= len(draft.spec) <= kind.formulas[1]:
        raise _Redraw
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
            stops.insert(place, "patrol")
            order.insert(place, home)
    return order, stops


def _keep_out(rng: Random, kind: Timed, stops: list[Stop], hazards: dict[str, int]) -> list[KeepOut]:
    """Each until keeps out of a region that is visited later or of a hazard in the way; other hazards get a window."""
    last = len(stops) - 1
    if kind.plain:
        return [KeepOut(name, 0, last, False) for name in hazards]
    entries = []
    for k, stop in enumerate(stops):
        if stop.form == "until":
            seen = {s.region for s in stops[: k + 1]}
            known = [name for name, hop in hazards.items() if hop <= k]
            known += [s.region for s in stops[k + 1 :] if s.region not in seen]
            if not known:
                raise _Redraw
            entries.append(KeepOut(rng.choice(known), 0, k, True))
            hazards.pop(entries[-1].region, None)
    entries += [KeepOut(name, rng.randint(0, hop), rng.randint(hop, last), False) for name, hop in hazards.items()]
    return entries


def _stay(rng: Random, kind: Timed, stop: Stop, depart: float, arrive: float) -> int | None:
    """Until when to stay at a stop. In plain levels that is the start of the window, perhaps before the arrival."""
    if stop.form in ("until", "patrol"):
        return None
    if stop.wait is None and stop.form in ("visit", "choice"):
        if not kind.plain:
            return None
        if math.floor(depart) < math.floor(arrive):
            return rng.randint(math.floor(depart) + 1, math.floor(arrive))
    return math.ceil(arrive) + (stop.wait or 0) + (stop.dwell if stop.form == "hold" else 0)


def _keep_out_clause(rng: Random, kind: Timed, entry: KeepOut, legs: list[Leg]) -> str:
    leg = legs[entry.last]
    if entry.until:
        return f"out({entry.region}) U[0,{math.ceil(leg.arrive) + rng.randint(*kind.slack)}] in({leg.region})"
    a = math.ceil(legs[entry.first].depart)
    b = math.ceil(leg.leave) + rng.randint(*kind.slack) if leg is legs[-1] else math.floor(leg.leave)
    if a >= b:
        raise _Redraw
    return f"G[{a},{b}] out({entry.region})"


def _visit_clauses(rng: Random, kind: Timed, stops: list[Stop], draft: Draft) -> list[str]:
    """A clause for every stop but those of an until, from the times at which it happened."""
    clauses = {}
    for k, (stop, leg) in enumerate(zip(stops, draft.legs, strict=True)):
        here, c = f"in({stop.region})", stop.dwell if stop.form == "hold" else 0
        a = max(0, math.floor(leg.arrive) - rng.randint(*kind.slack) if leg.hold is None else leg.hold - c)
        b = max(a, math.ceil(leg.arrive)) + rng.randint(*kind.slack)
        if stop.form == "visit":
            clauses[k] = f"F[{a},{b}] {here}"
        elif stop.form == "hold":
            clauses[k] = f"F[{a},{b}] G[0,{c}] {here}"
        elif stop.form == "choice":
            other, shift = rng.choice([r for r in draft.task.regions if r != stop.region]), rng.randint(-10, 10)
            options = [f"F[{a},{b}] {here}", f"F[{max(0, a + shift)},{max(0, a + shift) + b - a}] in({other})"]
            clauses[k] = " | ".join(rng.sample(options, 2))
        elif stop.form == "first":
            then = draft.legs[next(j for j in range(k, len(stops)) if stops[j].form == "second")]
            c, d = then.hold - leg.hold, then.hold - leg.hold + rng.randint(*kind.slack)
            clauses[k] = f"F[{a},{b}] ({here} & F[{c},{d}] in({then.region}))"
        elif stop.form == "patrol":  # one clause for all its stops
            legs = [leg for leg in draft.legs if leg.region == stop.region]
            gaps = [legs[0].arrive, *(q.arrive - p.leave for p, q in zip(legs, legs[1:], strict=False))]
            p = math.ceil(max(gaps)) + rng.randint(*kind.slack)
            clauses["patrol"] = f"G[0,{math.floor(legs[-1].leave)}] F[0,{p}] {here}"
    return list(clauses.values())


# ---- L6 to L8: collect each key before crossing its door, then reach the goal


@dataclass(frozen=True)
class KeyDoors:
    """How tasks of one level are drawn; pairs are ranges, cells in decimetres."""

    side: tuple[int, int]
    cell: tuple[int, int]
    doors: tuple[int, int]
    shortcuts: tuple[int, int]
    nested: int  # keys behind other doors, at least
    formulas: int = 0  # at least: visits of keys in a window are added


_KEY_DOORS = {
    "L6": KeyDoors((4, 5), (16, 20), (1, 2), (0, 0), 0),
    "L7": KeyDoors((5, 6), (15, 18), (3, 4), (0, 1), 1),
    "L8": KeyDoors((7, 8), (14, 15), (5, 6), (1, 2), 2, formulas=7),
}


def _key_doors(rng: Random, level: str) -> Draft:
    kind = _KEY_DOORS[level]
    doors, shortcuts = rng.randint(*kind.doors), rng.randint(*kind.shortcuts)
    drawn = mazes.key_door_maze(rng, rng.randint(*kind.side), 10 * rng.randint(*kind.cell), 20, 20, doors, shortcuts,
                                kind.nested)
    if drawn is None:
        raise _Redraw
    timed = rng.sample(drawn.keys, max(0, kind.formulas - doors - 1))
    draft, locked = Draft(drawn, 0.5), {key.replace("Key", "Door") for key in drawn.keys}
    for key in drawn.keys:
        wait = rng.randint(5, 30) if key in timed else None
        leg = draft.go(key, locked, lambda _, arrive, wait=wait: None if wait is None else math.ceil(arrive) + wait)
        door = key.replace("Key", "Door")
        locked.remove(door)
        draft.spec.append(f"out({door}) U[0,{_late(rng, leg.arrive)}] in({key})")
        if leg.hold is not None:
            draft.spec.append(f"F[{leg.hold},{leg.hold + rng.randint(10, 30)}] in({key})")
    dwell, wait = rng.choice((0, rng.randint(2, 10))), rng.randint(0, 20)
    leg = draft.go("Goal", locked, lambda _, arrive: math.ceil(arrive) + wait + dwell)
    a = leg.hold - dwell
    draft.spec.append(f"F[{a},{_late(rng, a)}] {f'G[0,{dwell}] ' if dwell else ''}in(Goal)")
    return draft


def _late(rng: Random, when: float) -> int:
    """A deadline for what can be done by `when`: 5 to 30% later, and 2 s at least."""
    return math.ceil(when * rng.uniform(1.05, 1.3)) + 2
