"""Shortest paths of a translating square among axis-aligned rectangles, exactly.

The body (a square of half-width r) is shrunk to its centre and every obstacle grows by r on each side (the Minkowski
sum of a rectangle and a square is a rectangle). What is left is a point among OPEN rectangles: touching is allowed, a
gap of exactly 2r is a line that can be passed, and so is the point where two grown corners meet. A shortest path
bends only at corners of grown rectangles, so A* on the visibility graph of these corners finds it
(de Berg et al., Computational Geometry, ch. 15; Hart, Nilsson and Raphael 1968).

Numbers mean the decimals that are written. They are scaled to integers and every test of a segment against a
rectangle is an integer predicate, held in float64 or int64 while the products fit and in Python's integers beyond.

Where a path to a region can end. The goal set is a closed rectangle G. A shortest path ends where it first meets G, at
a point g of G's boundary. Let v be the last corner that the path touches (or the start). If g is not the point of G
nearest to v, then moving g along G's boundary in some direction brings it nearer to v, and an obstacle R must forbid
this. If R touched the segment vg before g, it would do so at a corner, and v would not be the last one; so R touches
it at g, either because g lies on the side of R that G's boundary crosses, or because vg slides along a side of R that
reaches g. In both cases g is a point where the boundaries of R and G cross (corners included). So it is enough to
connect each v to its nearest point in G and to all such crossings. All of them lie on the grid of the map's numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stl.world import Rect, Task

LATEST = 1e6  # s; times up to here keep microseconds in a double
FINEST = 20  # decimals of a map that are told apart
START, GOAL = -2, -1  # ids in the search, beside those of the corners


@dataclass(frozen=True)
class Path:
    """A path: length in metres, waypoints [[t, x, y], ...], and a remark for the reader ("" if there is none)."""

    length: float
    waypoints: list[list[float]]
    note: str = ""


def plan_path(task: Task, start: Sequence[float], t_start: float = 0, goal_region: str | None = None,
              goal_point: Sequence[float] | None = None, avoid: Sequence[str] = (),
              hold_until: float | None = None) -> Path | None:
    """Shortest collision-free path at full speed from `start` (m) to a region or a point; None where there is none.

    It departs at `t_start` (s), keeps out of the regions in `avoid` (touching is allowed), and waits at the goal until
    `hold_until` (s). Each segment's duration is rounded up to 0.01 s where the map's numbers have two decimals, to
    1e-6 s elsewhere. A start or point finer than the map's grid (and than 1e-6 m) is rounded to it.
    Raises ValueError (one line) for unknown names, bad numbers, and both goals or none.
    """
    return find_path(task, start, t_start, goal_region, goal_point, avoid, hold_until)[0]


def find_path(task: Task, start: Sequence[float], t_start: float = 0, goal_region: str | None = None,
              goal_point: Sequence[float] | None = None, avoid: Sequence[str] = (),
              hold_until: float | None = None) -> tuple[Path | None, str]:
    """As plan_path, with the reason where there is no path: (path, "") or (None, reason)."""
    start = _point(start, "start")
    t_start = _time(t_start, "t_start")
    hold_until = None if hold_until is None else _time(hold_until, "hold_until")
    if (goal_region is None) == (goal_point is None):
        raise ValueError("give either goal_region or goal_point, and only one of them")
    avoid = _regions(task, () if avoid is None else avoid)
    rects = prepared(task)
    if goal_region is None:
        goal_name, goal = "the goal point", rects.snap(_point(goal_point, "goal_point")) * 2
    else:
        goal_name = _region(task, goal_region, "goal_region")
        goal = rects.room(goal_name)
    begin = rects.snap(start)
    reason = _blocked(rects, begin, goal, goal_name, avoid)
    if reason:
        return None, reason
    points = rects.shortest(begin, goal, avoid)
    if points is None:
        return None, _no_way(rects, begin, goal, goal_name, avoid)
    return _timed(rects, points, start, t_start, hold_until, task.robot.v_max), ""


def prepared(task: Task) -> GrownMap:
    """The task's map, ready for queries; kept for the maps used last."""
    return _prepared(task.workspace, task.robot.half_width, tuple(task.obstacles.items()), tuple(task.regions.items()))


@lru_cache(maxsize=64)
def _prepared(*args) -> GrownMap:
    return GrownMap(*args)


class GrownMap:
    """A map's grown rectangles and their corners in integers, `scale` to the metre.

    `boxes` [m, 4] holds the grown obstacles, then the grown regions, which count as obstacles only where a query
    avoids them. A corner's edges are worked out at its first use and kept: each carries, as bits, which avoided regions
    close it, so that another avoid list costs nothing.
    """

    def __init__(self, workspace: Rect, half_width: float, obstacles: tuple[tuple[str, Rect], ...],
                 regions: tuple[tuple[str, Rect], ...]):
        rects = [_sides(rect) for _, rect in (*obstacles, *regions)]
        numbers = [half_width, *_sides(workspace), *(x for sides in rects for x in sides)]
        places = max(-_decimal(x).as_tuple().exponent for x in numbers)
        self.ticks = 100 if places <= 2 else 1_000_000  # parts of a second to which durations are rounded up
        self.scale = 10 ** min(max(places, 6), FINEST)
        self.radius = r = self.snap([half_width])[0]
        self.names = [name for name, _ in (*obstacles, *regions)]
        self.n_obstacles, self.region = len(obstacles), {name: i for i, (name, _) in enumerate(regions)}
        x0, y0, x1, y1 = self.snap(_sides(workspace))
        self.inside = (x0 + r, y0 + r, x1 - r, y1 - r)
        self.grown = [(x0 - r, y0 - r, x1 + r, y1 + r) for x0, y0, x1, y1 in map(self.snap, rects)]
        size = max(abs(x) for box in (*self.grown, self.inside) for x in box)
        products = 16 * size * size  # bounds every number in _hits
        self.dtype = np.float64 if products < 2**53 else np.int64 if products < 2**63 else object
        self.boxes = np.array(self.grown, self.dtype).reshape(-1, 4)
        self._find_corners()

    def snap(self, numbers: Sequence[float]) -> tuple[int, ...]:
        """Numbers in metres as integers of the map's grid."""
        return tuple(int((_decimal(x) * self.scale).to_integral_value()) for x in numbers)

    def room(self, region: str) -> tuple[int, int, int, int]:
        """Where the body's centre can be while it is inside the region: [x0, x1] x [y0, y1], perhaps empty."""
        x0, y0, x1, y1 = self.grown[self.n_obstacles + self.region[region]]
        r2, inside = 2 * self.radius, self.inside
        return max(x0 + r2, inside[0]), max(y0 + r2, inside[1]), min(x1 - r2, inside[2]), min(y1 - r2, inside[3])

    def covers(self, box: int, goal: tuple[int, ...]) -> bool:
        """Whether the open grown rectangle holds all of the closed rectangle `goal`."""
        x0, y0, x1, y1 = self.grown[box]
        return x0 < goal[0] and y0 < goal[1] and goal[2] < x1 and goal[3] < y1

    def _find_corners(self) -> None:
        """Collect corners that the body's centre can reach: xy [n, 2], and which way a taut string turns there.

        `slope` is the sign of dx * dy of a direction that grazes the corner. `owner` is the bit of the region whose
        corner it is (the string turns there only while that region is avoided), 0 for obstacles.
        """
        corners = {}
        low_x, low_y, high_x, high_y = self.inside
        for i, (x0, y0, x1, y1) in enumerate(self.grown):
            owner = 1 << i - self.n_obstacles if i >= self.n_obstacles else 0
            for x, y, slope in ((x0, y0, -1), (x1, y1, -1), (x0, y1, 1), (x1, y0, 1)):
                free = low_x <= x <= high_x and low_y <= y <= high_y
                if free and not any(self.covers(k, (x, y, x, y)) for k in range(self.n_obstacles)):
                    corners[x, y, slope, owner] = None
        self.points = [(x, y) for x, y, _, _ in corners]
        self.xy = np.array(self.points, self.dtype).reshape(-1, 2)
        self.slope = np.array([slope for _, _, slope, _ in corners], int)
        self.owner = [owner for *_, owner in corners]
        n = len(self.region)
        self.bits = np.array([1 << i for i in range(n)], np.int64 if n < 63 else object)
        self.all_regions = (1 << n) - 1
        self.rows: list[list[tuple[int, float, int]] | None] = [None] * len(corners)

    def edges(self, v: int) -> list[tuple[int, float, int]]:
        """Taut edges of corner v: (corner, metres, lock). A lock's low bits are the regions that close the edge while
        they are avoided, its high bits the region that must be avoided for the other end to be a corner at all."""
        if self.rows[v] is None:
            d = self.xy - self.xy[v]
            turn = np.sign(d[:, 0]) * np.sign(d[:, 1])
            ends = np.flatnonzero((turn * self.slope >= 0) & (turn * self.slope[v] >= 0))
            ends = ends[ends != v]
            hits = _hits(self.xy[v][None], self.xy[ends], self.boxes)
            free = ~hits[:, :self.n_obstacles].any(1)
            ends, n = ends[free], len(self.region)
            locks = (hits[free, self.n_obstacles:] @ self.bits).tolist() if n else [0] * len(ends)
            metres = _metres(d[ends], self.scale).tolist()
            self.rows[v] = [(w, length, int(lock) | self.owner[w] << n)
                            for w, length, lock in zip(ends.tolist(), metres, locks, strict=True)]
        return self.rows[v]

    def shortest(self, start: tuple[int, ...], goal: tuple[int, ...], avoid: Sequence[str]) -> list | None:
        """Points of a shortest path from a free point into the rectangle `goal` (A*), or None."""
        avoided = sum(1 << self.region[name] for name in avoid)
        key = avoided | (self.all_regions ^ avoided) << len(self.region)
        first, end, floor = self._ends(start, goal, avoided)
        heap, parent, best = [(0.0, 0.0, START, START)], {}, {}
        while heap:
            _, cost, v, back = heapq.heappop(heap)
            if v in parent:
                continue
            parent[v] = back
            if v == GOAL:
                return self._unwind(parent, start, end[back][1])
            if v in end:
                total = cost + end[v][0]
                heapq.heappush(heap, (total, total, GOAL, v))
            for w, length, lock in first if v == START else self.edges(v):
                if w not in parent and not lock & key and cost + length < best.get(w, math.inf):
                    best[w] = cost + length
                    heapq.heappush(heap, (cost + length + floor[w], cost + length, w, v))
        return None

    def _ends(self, start: tuple[int, ...], goal: tuple[int, ...], avoided: int) -> tuple[list, dict, list]:
        """The query's own edges: from the start to corners, as in edges(); {corner or START: (metres, goal point)}, the
        best visible one; and for each corner its distance to the goal rectangle, which A* uses as its bound."""
        active = [*range(self.n_obstacles), *(self.n_obstacles + i for i in self.region.values() if avoided >> i & 1)]
        boxes = self.boxes[active]
        corners = [v for v, owner in enumerate(self.owner) if not owner & ~avoided]
        origin = np.array([start], self.dtype)
        xy = np.concatenate([self.xy[corners], origin])  # [n + 1, 2], the start last
        low, high = np.array([goal[:2]], self.dtype), np.array([goal[2:]], self.dtype)
        nearest = np.minimum(np.maximum(xy, low), high)
        crossings = self._crossings(boxes, goal)
        ends = np.stack([nearest, *(np.broadcast_to(c, xy.shape) for c in crossings)])  # [1 + crossings, n + 1, 2]
        tails = np.broadcast_to(xy, ends.shape).reshape(-1, 2)
        segments = (np.concatenate([np.broadcast_to(origin, xy[:-1].shape), tails]),
                    np.concatenate([xy[:-1], ends.reshape(-1, 2)]))
        free, metres = ~_hits(*segments, boxes).any(1), _metres(segments[1] - segments[0], self.scale)
        n = len(corners)
        first = [(corners[i], metres[i], 0) for i in np.flatnonzero(free[:n])]
        to_goal = np.where(free[n:], metres[n:], math.inf).reshape(len(ends), n + 1)
        choice, ids = to_goal.argmin(0), [*corners, START]
        end = {ids[i]: (to_goal[choice[i], i], tuple(map(int, ends[choice[i], i])))
               for i in np.flatnonzero(to_goal.min(0) < math.inf)}
        return first, end, dict(zip(corners, metres[n:2 * n], strict=True))

    def _crossings(self, boxes: np.ndarray, goal: tuple[int, ...]) -> list[tuple[int, int]]:
        """Points where the boundary of the goal rectangle crosses that of a box and which no box covers."""
        x0, y0, x1, y1 = goal
        near = boxes[(boxes[:, 0] <= x1) & (boxes[:, 1] <= y1) & (boxes[:, 2] >= x0) & (boxes[:, 3] >= y0)]
        found = set()
        for left, low, right, high in near.tolist():
            found |= {(x, y) for x in (left, right) if x0 <= x <= x1 for y in (y0, y1) if low <= y <= high}
            found |= {(x, y) for y in (low, high) if y0 <= y <= y1 for x in (x0, x1) if left <= x <= right}
        return [(x, y) for x, y in sorted(found) if not any(a < x < c and b < y < d for a, b, c, d in near.tolist())]

    def _unwind(self, parent: dict[int, int], start: tuple[int, ...], end: tuple[int, ...]) -> list[tuple[int, int]]:
        """The points of the path that A* found, without repeated ones and without ones on the way between others."""
        way, v = [end], parent[GOAL]
        while v != START:
            way.append(self.points[v])
            v = parent[v]
        points = [start]
        for i, p in enumerate(reversed(way)):
            following = way[-i - 2] if i + 1 < len(way) else None
            (x, y), (px, py) = points[-1], p
            straight = following and (px - x) * (following[1] - py) == (py - y) * (following[0] - px)
            if p != points[-1] and not straight:
                points.append(p)
        return points


def _hits(p: np.ndarray, q: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Which closed segments p-q ([n, 2] or [1, 2]) of positive length meet which open boxes [m, 4]: bool [n, m].

    Separating axes: x, y and the segment's normal. Exact, as all values are integers.
    """
    x0, y0, x1, y1 = boxes.T
    d = q - p
    low, high = np.minimum(p, q), np.maximum(p, q)
    lines = np.stack([d[:, 0], -d[:, 1], 2 * (d[:, 1] * p[:, 0] - d[:, 0] * p[:, 1])], 1)  # [n, 3]
    offset = abs(lines @ np.stack([y0 + y1, x0 + x1, np.ones_like(x0)]))
    reach = abs(d) @ np.stack([y1 - y0, x1 - x0])
    hits = offset < reach
    hits &= (high[:, :1] > x0) & (low[:, :1] < x1)
    hits &= (high[:, 1:] > y0) & (low[:, 1:] < y1)
    return hits


def _metres(d: np.ndarray, scale: int) -> np.ndarray:
    """Lengths in metres of integer vectors [n, 2]."""
    d = d.astype(float)
    return np.hypot(d[:, 0], d[:, 1]) / scale


def _timed(rects: GrownMap, points: list, start: tuple[float, float], t_start: float, hold_until: float | None,
           v_max: float) -> Path:
    """Put times to the points: full speed, each duration rounded up to the map's part of a second."""
    time, speed, length = _decimal(t_start), Fraction(_decimal(v_max)), 0.0
    waypoints = [[t_start, *start]]
    for (x, y), (to_x, to_y) in zip(points, points[1:], strict=False):
        square = (to_x - x) ** 2 + (to_y - y) ** 2
        n2 = math.ceil(square * (Fraction(rects.ticks, rects.scale) / speed) ** 2)  # ticks needed, squared
        time += Decimal(math.isqrt(n2 - 1) + 1) / rects.ticks
        length += math.sqrt(square) / rects.scale
        waypoints.append([float(time), to_x / rects.scale, to_y / rects.scale])
    note = ""
    if hold_until is not None and _decimal(hold_until) > time:
        waypoints.append([hold_until, *waypoints[-1][1:]])
    elif hold_until is not None and _decimal(hold_until) < time:
        note = f"hold_until {hold_until} is before the arrival at {float(time)}, so there is no waiting."
    return Path(length, waypoints, note)


def _blocked(rects: GrownMap, start: tuple, goal: tuple, goal_name: str, avoid: Sequence[str]) -> str:
    """Why the start or the goal alone rules a path out, or ""."""
    x0, y0, x1, y1 = (x / rects.scale for x in rects.inside)
    place = f"the workspace (its centre may be at x in [{x0}, {x1}], y in [{y0}, {y1}])"
    if not _within(start, rects.inside):
        return f"the body at the start is not inside {place}."
    box = goal if goal_name not in rects.region else rects.grown[rects.n_obstacles + rects.region[goal_name]]
    if goal_name in rects.region and min(box[2] - box[0], box[3] - box[1]) < 4 * rects.radius:
        return f"the body (width {2 * rects.radius / rects.scale}) does not fit into region {goal_name}."
    if goal[0] > goal[2] or goal[1] > goal[3] or not _within(goal[:2], rects.inside):
        return f"the body at {goal_name} is not inside {place}."
    for where, spot in (("the start", start * 2), (goal_name, goal)):
        for i, name in enumerate(rects.names):
            if rects.covers(i, spot) and (i < rects.n_obstacles or name in avoid):
                what = "obstacle" if i < rects.n_obstacles else "avoided region"
                return f"the body at {where} overlaps {what} {name}."
    return ""


def _no_way(rects: GrownMap, start: tuple, goal: tuple, goal_name: str, avoid: Sequence[str]) -> str:
    """What keeps the body from a goal that is free in itself."""
    if avoid and rects.shortest(start, goal, ()):
        return f"every way to {goal_name} leads through the avoided regions ({', '.join(avoid)})."
    return f"the obstacles leave no way from the start to {goal_name}."


def _within(point: Sequence[int], box: Sequence[int]) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _sides(rect: Rect) -> tuple[float, float, float, float]:
    return rect.xmin, rect.ymin, rect.xmax, rect.ymax


def _decimal(x: float) -> Decimal:
    return Decimal(repr(float(x)))


def _number(x: object, what: str) -> float:
    if isinstance(x, bool) or not isinstance(x, Real) or not abs(x) < 1e9:
        raise ValueError(f"{what} must be a finite number, not {str(x)[:40]!r}")
    return float(x)


def _point(value: object, what: str) -> tuple[float, float]:
    if isinstance(value, str | bytes | dict) or not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
        raise ValueError(f"{what} must be two numbers [x, y], not {str(value)[:40]!r}")
    return _number(value[0], f"x of {what}"), _number(value[1], f"y of {what}")


def _time(value: object, what: str) -> float:
    time = _number(value, what)
    if not 0 <= time <= LATEST:
        raise ValueError(f"{what} must be between 0 and {LATEST:.0f} s, not {time}")
    return time


def _region(task: Task, name: object, what: str) -> str:
    if isinstance(name, str) and name in task.regions:
        return name
    near = get_close_matches(str(name)[:40], task.regions, 1)
    kind = "is an obstacle, not a region" if isinstance(name, str) and name in task.obstacles else "is not a region"
    raise ValueError(f"{what}: {str(name)[:40]!r} {kind}" + (f"; did you mean {near[0]!r}?" if near else "")
                     + f" The regions are: {', '.join(task.regions) or 'none'}.")


def _regions(task: Task, names: object) -> list[str]:
    if isinstance(names, str | bytes | dict) or not isinstance(names, Sequence):
        raise ValueError(f"avoid must be a list of region names, not {str(names)[:40]!r}")
    return list(dict.fromkeys(_region(task, name, "avoid") for name in names))
