"""A solver that has no witness: a beam search over visits, with plan_path for the legs and the exact monitor as judge.

A node is a path so far, ending in a region; its children go on to another region that some formula still needs. Each
leg is first planned freely. Where it breaks a formula by entering a region, it is planned round that region, and where
that is impossible, it departs later. The robot then leaves at once, or stays until what some formula wants from this
region is done. Both are decided by evaluating the formulas on the path so far: "everything may still hold, from the
moment at which its region can be reached" prunes a node, "no visit comes any more" counts what is done. As formulas
have no negation, the first never prunes a path that can be completed.

What it cannot solve: tasks that need two overlapping regions at once where the nearest point of one is not in the
other, a certain spot within a region, a detour that no formula's region lies on, a slow or longer way on purpose (it
only waits at the end of a leg), or an early wait for a region that only a later leg enters. That it finds nothing does
not prove that there is nothing.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from stl.formula import F, Formula, G, In, Out, Until, children, walk
from stl.intervals import Intervals, gaps, holds, intersection, union
from stl.monitor import Judge, Leaves, check
from stl.planner import plan_path
from stl.world import Task

Waypoints = list[list[float]]
Atoms = dict[Formula, Intervals]  # when each atom holds
WIDTHS = (6, 24, 96, 384)  # nodes kept a layer, in one attempt after the other
MAX_STOPS = 40  # visits on a path


def search(task: Task, seconds: float = 10.0) -> tuple[Waypoints | None, str]:
    """A path that satisfies `task`, or None, and what happened in one line; takes at most about `seconds`."""
    return _Search(task, seconds).run()


@dataclass(frozen=True)
class _Node:
    path: Waypoints
    atoms: Atoms  # up to the end of the path
    region: str  # where it ends; "" at the start
    done: frozenset[int]  # formulas that hold even if no region is visited any more


def _until(atoms: Atoms, end: float) -> Atoms:
    return {atom: intersection(times, [(-1.0, end)]) for atom, times in atoms.items()}


class _Search:
    def __init__(self, task: Task, seconds: float):
        self.task, self.seconds, self.deadline = task, seconds, time.monotonic() + seconds
        self.best, self.cut = 0, False  # most formulas done on any path; whether nodes were dropped for width
        self.leaves, self.formulas = Leaves(task), task.formulas
        self.atoms = [[n for n in walk(f) if isinstance(n, In | Out)] for f in self.formulas]
        self.delays = [_delays(f)[1] for f in self.formulas]
        self.plan = cache(lambda here, region, avoid: plan_path(task, here, 0, region, avoid=avoid))

    def run(self) -> tuple[Waypoints | None, str]:
        path = [[0.0, *self.task.robot.start]]
        verdict = check(self.task, path)
        if verdict.ok:
            return path, "staying at the start satisfies everything"
        if any(violation.kind != "clause" for violation in verdict.violations):
            return None, "the start collides or lies outside the workspace, so there is no path"
        root = self._node(path, self._follow({}, path, 0.0), 0.0, "")
        for width in WIDTHS:
            layer, self.cut = [root] if root else [], False
            for _ in range(MAX_STOPS):
                layer, found = self._next_layer(layer, width)
                if found:
                    return found, f"found a path of {len(found)} waypoints"
            late = time.monotonic() > self.deadline
            if late or not self.cut:
                break
        how = f"within the time limit of {self.seconds:g} s" if late else "among the orders of visits that are tried"
        return None, f"no path found {how}; at best {self.best} of {len(self.formulas)} formulas were done"

    def _next_layer(self, layer: list[_Node], width: int) -> tuple[list[_Node], Waypoints | None]:
        """The best nodes one visit on, or a solution."""
        found: list[_Node] = []
        for node in layer:
            for child, rest in self._children(node):
                if time.monotonic() > self.deadline:
                    return [], None
                if rest:
                    return [], rest
                if child:
                    found.append(child)
        found.sort(key=lambda node: (-len(node.done), node.path[-1][0]))
        self.cut |= len(found) > width
        self.best = max([self.best, *(len(node.done) for node in found)])
        return found[:width], None

    def _children(self, node: _Node) -> Iterator[tuple[_Node | None, Waypoints | None]]:
        """(a node one visit on, None), or (None, a path that satisfies everything as the robot rests at its end)."""
        wanted = {a.region: None for i, atoms in enumerate(self.atoms) if i not in node.done
                  for a in atoms if isinstance(a, In) and a.region != node.region}
        for region, leg in ((region, leg) for region in wanted if (leg := self._leg(node, region))):
            path = [*node.path, *leg[1:]]
            full = self._follow(node.atoms, leg, node.path[-1][0])
            if all(self._true(i, full) for i in range(len(self.formulas))) and check(self.task, path).ok:
                yield None, path
            for stay in sorted(self._stays(node, region, full, leg[-1][0])):
                held = [*path, [stay, *path[-1][1:]]] if stay > path[-1][0] else path
                yield self._node(held, full, stay, region), None

    def _node(self, path: Waypoints, full: Atoms, until: float, region: str) -> _Node | None:
        """The node that ends at time `until`, unless some formula cannot become true any more."""
        atoms = _until(full, until)
        if self._lost(atoms, until, path[-1][1:]):
            return None
        last = {a: times if isinstance(a, In) else union(times, [(until, math.inf)]) for a, times in atoms.items()}
        done = frozenset(i for i in range(len(self.formulas)) if self._true(i, last))
        return _Node(path, atoms, region, done)

    def _lost(self, atoms: Atoms, now: float, here: list[float]) -> list[int]:
        """Formulas that cannot hold whatever comes after `now`, as no region is reached faster than on a free way."""
        later = {}
        for atom, times in atoms.items():
            begin = now
            if isinstance(atom, In) and not holds(times, now):
                way = self.plan(tuple(here), atom.region, ())
                begin = now + way.arrival if way else math.inf
            later[atom] = union(times, [(begin, math.inf)]) if begin < math.inf else times
        return [i for i in range(len(self.formulas)) if not self._true(i, later)]

    def _true(self, i: int, atoms: Atoms) -> bool:
        return holds(Judge(self.task, atoms).truth(self.formulas[i]), 0.0)

    def _follow(self, past: Atoms, leg: Waypoints, since: float) -> Atoms:
        """When the atoms hold if the robot rests for ever at the end of `leg`, which departs at `since`."""
        *_, times = self.leaves.follow(leg)
        return {a: union(past.get(a, []), intersection(t, [(since, math.inf)])) for a, t in times.items()}

    def _leg(self, node: _Node, region: str) -> Waypoints | None:
        """A way to the region that loses no formula: round the regions that it must not enter, or later."""
        (now, *here), wait = node.path[-1], 0.0
        avoid, added, forced = frozenset(), frozenset(), frozenset({region})
        for _ in range(8):
            way = self.plan(tuple(here), region, tuple(sorted(avoid)))
            if way is None and not added:
                return None
            if way is None:  # there is no way round those that were added last
                avoid, forced, added = avoid - added, forced | added, frozenset()
                continue
            leg = [[round(now + wait + t, 6), x, y] for t, x, y in way.waypoints]
            leg = [[now, *here], *leg] if wait else leg
            end = leg[-1][0]
            atoms = _until(self._follow(node.atoms, leg, now), end)
            lost = self._lost(atoms, end, leg[-1][1:])
            if not lost:
                return leg
            entered = {a: times[0][0] for i in lost for a in self.atoms[i]
                       if isinstance(a, Out) and (times := gaps(atoms[a], now, end))}
            if added := frozenset(a.region for a in entered) - forced - avoid:
                avoid |= added
                continue
            waits = [e + d - enter for a, enter in entered.items() for i in lost if a in self.atoms[i]
                     for d in self.delays[i] for e in self._events(i, node.atoms) if e + d > enter + 1e-6]
            if not waits:
                return None
            wait = math.ceil(100 * (wait + min(waits))) / 100
        return None

    def _events(self, i: int, atoms: Atoms) -> set[float]:
        """Times from which formula i may count: 0, and when its regions were entered and left."""
        return {0.0, *(round(t, 2) for a in self.atoms[i] if isinstance(a, In) for span in atoms[a] for t in span
                       if t < math.inf)}

    def _stays(self, node: _Node, region: str, full: Atoms, arrival: float) -> set[float]:
        """Until when to stay: not at all, or until some formula needs this region no more."""
        stays = {arrival}
        for i, atoms in enumerate(self.atoms):
            if i in node.done or In(region) not in atoms:
                continue
            ends = sorted({arrival, *(e + d for e in self._events(i, full) for d in self.delays[i] if e + d > arrival)})
            for others in ((arrival, math.inf), (-1.0, -1.0)):  # other regions are visited later on, or no more
                later = {a: union(full[a], [others if isinstance(a, In) else (arrival, math.inf)]) for a in atoms}
                here = In(region)
                first = bisect_left(ends, True, key=lambda end: self._true(
                    i, later | {here: intersection(full[here], [(-1.0, end)])}))
                stays |= set(ends[first : first + 1])
        return stays


def _delays(node: Formula) -> tuple[set[float], set[float]]:
    """Sums of window ends on the ways down to the atoms, at which waiting can pay: (from this node, from any below)."""
    parts = [_delays(child) for child in children(node)]
    here = set().union(*(full for full, _ in parts)) if parts else {0.0}
    if isinstance(node, F | G | Until):
        here = {x + (node.b if isinstance(node, G) else node.a) for x in here}
    return here, here.union(*(every for _, every in parts))
