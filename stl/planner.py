"""Shortest paths of a translating square among axis-aligned rectangles, exactly.

The body (a square of half-width r) is shrunk to its centre and every obstacle grows by r on each side. What is left is
a point among OPEN rectangles: touching is allowed, a gap of exactly 2r is a line that can be passed, and so is the
point where two grown corners meet. A shortest path bends only at corners of grown rectangles, so A* on the visibility
graph of these corners finds it (de Berg et al., Computational Geometry, ch. 15; Hart, Nilsson and Raphael 1968).

Numbers mean the decimals that are written. They are scaled to integers and every test of a segment against a
rectangle is an integer predicate, held in float64 or int64 while the products fit and in Python's integers beyond.

Where a path to a region can end. The goal set is a closed rectangle G. A shortest path ends where it first meets G, at
a point g of G's boundary. Let v be the last corner that it touches (or the start). If g is not the point of G nearest
to v, then moving g along the boundary one way brings it nearer to v, and an obstacle R must forbid this. R touches the
segment vg only at g, as it would do so before at a corner, and v would not be the last one. So g lies on the side of R
that G's boundary crosses, or vg slides along a side of R that reaches g: in both cases the boundaries of R and G cross
in g (corners included). So each v is joined to its nearest point in G and to all such crossings, and no more. All of
them lie on the grid of the map's numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from numbers import Real

import numpy as np

from stl.formula import brief, nearest
from stl.world import Rect, Task

LATEST = 1e6  # s; times up to here keep microseconds in a double
FINEST = 20  # decimals of a map that are told apart
EAGER = 400  # up to so many corners, all edges are found at once
BATCH = 1 << 16  # pairs of a segment and a box that are tested together, to stay in the processor's cache
START, GOAL = -1, -2  # in the search, beside the numbers of the corners; the start is the last point of a query
XY = Sequence[float]  # x, y in metres
Point = tuple[int, int]  # x, y on the map's integer grid
Box = tuple[int, int, int, int]  # x0, y0, x1, y1 on that grid


@dataclass(frozen=True)
class Path:
    """A path: metres, waypoints [[t, x, y], ...] with seconds, the arrival, and a remark for the reader or ""."""

    length: float
    waypoints: list[list[float]]
    arrival: float
    note: str = ""


def plan_path(task: Task, start: XY, t_start: float = 0, goal_region: str | None = None, goal_point: XY | None = None,
              avoid: Sequence[str] = (), hold_until: float | None = None) -> Path | None:
    """Shortest collision-free path at full speed from `start` (m) to a region or a point; None where there is none.

    It departs at `t_start` (s), keeps out of the regions in `avoid` (touching is allowed), and waits at the goal until
    `hold_until` (s). Each segment's duration is rounded up to 0.01 s where the map's numbers have two decimals, to
    1e-6 s elsewhere. A start or point finer than the map's grid (and than 1e-6 m) is rounded to it.
    Raises ValueError (one line) for unknown names, bad numbers, and both goals or none.
    """
    return find_path(task, start, t_start, goal_region, goal_point, avoid, hold_until)[0]


def find_path(task: Task, start: XY, t_start: float = 0, goal_region: str | None = None, goal_point: XY | None = None,
              avoid: Sequence[str] = (), hold_until: float | None = None) -> tuple[Path | None, str]:
    """As plan_path, with the reason where there is no path: (path, "") or (None, reason)."""
    start, t_start = _point(start, "start"), _number(t_start, "t_start", 0, LATEST)
    hold_until = math.nan if hold_until is None else _number(hold_until, "hold_until", 0, LATEST)
    if (goal_region is None) == (goal_point is None):
        raise ValueError("give either goal_region or goal_point, and only one of them")
    if isinstance(avoid, str | bytes) or not isinstance(avoid, Sequence):
        raise ValueError(f"avoid must be a list of region names, not {brief(avoid)}")
    grown = prepared(task)
    avoid = list(dict.fromkeys(_region(task, name, "avoid") for name in avoid))
    if goal_region is None:
        name, goal = "the goal point", grown.snap(_point(goal_point, "goal_point")) * 2
    else:
        name = _region(task, goal_region, "goal_region")
        goal = grown.room(name)
    begin = grown.snap(start)
    if reason := _blocked(grown, begin, goal, name, avoid):
        return None, reason
    points = grown.shortest(begin, goal, avoid)
    if points:
        return _timed(grown, points, start, t_start, hold_until, task.robot.v_max), ""
    if avoid and grown.shortest(begin, goal, ()):
        return None, f"every way to {name} leads through the avoided regions ({', '.join(avoid)})"
    return None, f"the obstacles leave no way from the start to {name}"


def prepared(task: Task) -> GrownMap:
    """The task's map, ready for queries; the maps used last are kept."""
    return _prepared(task.workspace, task.robot.half_width, tuple(task.obstacles.items()), tuple(task.regions.items()))


class GrownMap:
    """A map's grown rectangles and their corners in integers, `scale` to the metre.

    `boxes` [m, 4] holds the grown obstacles, then the grown regions, which count as obstacles only where a query
    avoids them. Each edge between corners carries, as bits, which regions close it while they are avoided, so that
    another avoid list costs nothing. On very large maps a corner's edges are found at its first use.
    """

    def __init__(self, workspace: Rect, half_width: float, obstacles: tuple[tuple[str, Rect], ...],
                 regions: tuple[tuple[str, Rect], ...]):
        rects = [rect for _, rect in (*obstacles, *regions)]
        places = max(-_decimal(x).as_tuple().exponent for x in (half_width, *workspace, *(x for r in rects for x in r)))
        self.ticks = 100 if places <= 2 else 1_000_000  # parts of a second to which durations are rounded up
        self.scale = 10 ** min(max(places, 6), FINEST)
        self.radius = r = self.snap([half_width])[0]
        self.n_obstacles = len(obstacles)
        self.names = [name for name, _ in (*obstacles, *regions)]
        self.region = {name: i for i, (name, _) in enumerate(regions)}
        x0, y0, x1, y1 = self.snap(workspace)
        self.inside = (x0 + r, y0 + r, x1 - r, y1 - r)
        self.grown = [(x0 - r, y0 - r, x1 + r, y1 + r) for x0, y0, x1, y1 in map(self.snap, rects)]
        size = max(abs(x) for box in (*self.grown, self.inside) for x in box)
        products = 16 * size * size  # bounds every number in _hits
        self.dtype = np.float64 if products < 2**53 else np.int64 if products < 2**63 else object
        self.boxes = np.array(self.grown, self.dtype).reshape(-1, 4)
        self._find_corners()

    def snap(self, metres: Sequence[float]) -> tuple[int, ...]:
        """Numbers in metres as integers of the map's grid."""
        return tuple(int((_decimal(x) * self.scale).to_integral_value()) for x in metres)

    def room(self, region: str) -> Box:
        """Where the body's centre can be while the body is inside the region; empty (x0 > x1) if it cannot be."""
        x0, y0, x1, y1 = self.grown[self.n_obstacles + self.region[region]]
        r2, inside = 2 * self.radius, self.inside
        return max(x0 + r2, inside[0]), max(y0 + r2, inside[1]), min(x1 - r2, inside[2]), min(y1 - r2, inside[3])

    def _find_corners(self) -> None:
        """Collect the corners that the centre can reach, of regions too: `points` and `xy` [n, 2]. `slope` [n] is the
        sign of dx * dy of a direction that grazes the corner."""
        x0, y0, x1, y1 = self.boxes.T
        xy = np.stack([x0, y0, x1, y1, x0, y1, x1, y0], 1).reshape(-1, 2)  # per box two of slope -1, two of slope 1
        (x, y), (x0, y0, x1, y1) = xy.T[..., None], self.boxes[:self.n_obstacles].T
        free = ~((x > x0) & (x < x1) & (y > y0) & (y < y1)).any(1)
        free &= (xy >= self.inside[:2]).all(1) & (xy <= self.inside[2:]).all(1)
        places = np.flatnonzero(free).tolist()
        corners = dict.fromkeys((int(xy[i, 0]), int(xy[i, 1]), -1 if i % 4 < 2 else 1) for i in places)  # each once
        self.points = [(x, y) for x, y, _ in corners]
        self.xy = np.array(self.points, self.dtype).reshape(-1, 2)
        self.slope = np.array([slope for *_, slope in corners], int)
        self.rows: list[list[tuple[int, float, int]] | None] = [None] * len(corners)
        if len(corners) <= EAGER:
            self._find_edges(range(len(corners)))

    def edges(self, v: int) -> list[tuple[int, float, int]]:
        """Taut edges of corner v: (corner, metres, lock), where the lock's bits are the regions that close the edge."""
        if self.rows[v] is None:
            self._find_edges([v])
        return self.rows[v]

    def _find_edges(self, corners: Sequence[int]) -> None:
        d = self.xy - self.xy[corners, None]  # [corners, n, 2]
        turn = np.sign(d[..., 0]) * np.sign(d[..., 1])
        v, w = np.nonzero((turn * self.slope >= 0) & (turn * self.slope[corners, None] >= 0) & (d != 0).any(-1))
        v = np.array(corners)[v]
        free = ~_hits(self.xy[v], self.xy[w], self.boxes[: self.n_obstacles]).any(1)
        v, w = v[free], w[free]
        metres = self._metres(self.xy[w] - self.xy[v])
        hits = np.packbits(_hits(self.xy[v], self.xy[w], self.boxes[self.n_obstacles :]), axis=1, bitorder="little")
        for i in corners:
            self.rows[i] = []
        for i, j, length, bits in zip(v.tolist(), w.tolist(), metres.tolist(), hits, strict=True):
            self.rows[i].append((j, length, int.from_bytes(bits.tobytes(), "little")))

    def _metres(self, d: np.ndarray) -> np.ndarray:
        """Lengths of [n, 2]. By sqrt, which is rounded alike on every machine, so that ties break alike too."""
        return np.sqrt((d * d).sum(-1).astype(float)) / self.scale

    def shortest(self, start: Point, goal: Box, avoid: Sequence[str]) -> list[Point] | None:
        """Points of a shortest path from a free point into the rectangle `goal` (A*), or None."""
        closed = sum(1 << self.region[name] for name in avoid)
        first, end, floor = self._ends(start, goal, avoid)
        heap, parent, best = [(0.0, 0.0, START, START)], {}, {}
        while heap:
            _, cost, v, back = heapq.heappop(heap)
            if v in parent:
                continue
            parent[v] = back
            if v == GOAL:
                return self._unwind(parent, start, tuple(map(int, end[back][1])))
            if end[v][0] < math.inf:
                heapq.heappush(heap, (cost + end[v][0], 0.0, GOAL, v))
            for w, metres, lock in first if v == START else self.edges(v):
                if w not in parent and not lock & closed and cost + metres < best.get(w, math.inf):
                    best[w] = cost + metres
                    heapq.heappush(heap, (cost + metres + floor[w], cost + metres, w, v))
        return None

    def _ends(self, start: Point, goal: Box, avoid: Sequence[str]) -> tuple[list, list, list]:
        """The query's own edges: from the start to corners, as in edges(); from each corner, and last the start, to the
        nearest goal point it sees, as (metres, point); and their distances to the goal rectangle, A*'s lower bounds."""
        boxes = self.boxes[[*range(self.n_obstacles), *(self.n_obstacles + self.region[name] for name in avoid)]]
        xy = np.concatenate([self.xy, np.array([start], self.dtype)])  # [n, 2]
        low, high, *crossings = (np.array(c, self.dtype) for c in (goal[:2], goal[2:], *_crossings(boxes, goal)))
        ends = np.stack([xy.clip(low, high), *(np.broadcast_to(c, xy.shape) for c in crossings)])  # [ends, n, 2]
        # all segments in one go: from the start to each of the n, then from each of the n to its ends
        tails = np.concatenate([np.broadcast_to(xy[-1:], xy.shape), np.broadcast_to(xy, ends.shape).reshape(-1, 2)])
        heads = np.concatenate([xy, ends.reshape(-1, 2)])
        free, metres, n = ~_hits(tails, heads, boxes).any(1), self._metres(heads - tails), len(xy)
        first = [(v, float(metres[v]), 0) for v in np.flatnonzero(free[: n - 1]).tolist()]
        to_goal = np.where(free[n:], metres[n:], math.inf).reshape(-1, n)  # [ends, n]
        best = ends[to_goal.argmin(0), range(n)].tolist()
        return first, list(zip(to_goal.min(0).tolist(), best, strict=True)), metres[n : 2 * n].tolist()

    def _unwind(self, parent: dict[int, int], start: Point, end: Point) -> list[Point]:
        """The points of the path that A* found, without those that lie straight between their neighbours."""
        points, v = [end], parent[GOAL]
        while v != START:
            points.append(self.points[v])
            v = parent[v]
        way = []
        for x, y in [*points, start]:
            if len(way) > 1:
                (ax, ay), (bx, by) = way[-2:]
                if (bx - ax) * (y - by) == (by - ay) * (x - bx):
                    way.pop()
            if way[-1:] != [(x, y)]:
                way.append((x, y))
        return way[::-1]


def _hits(p: np.ndarray, q: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Which closed segments p-q ([n, 2] each) of positive length meet which open boxes [m, 4]: bool [n, m].

    Separating axes: x, y and the segment's normal. Exact, as all values are integers.
    """
    rows = max(1, BATCH // max(1, len(boxes)))
    if len(p) > rows:
        return np.concatenate([_hits(p[i : i + rows], q[i : i + rows], boxes) for i in range(0, len(p), rows)])
    x0, y0, x1, y1 = boxes.T
    d, low, high = q - p, np.minimum(p, q), np.maximum(p, q)
    lines = np.stack([d[:, 0], -d[:, 1], 2 * (d[:, 1] * p[:, 0] - d[:, 0] * p[:, 1])], 1)  # [n, 3]
    hits = abs(lines @ np.stack([y0 + y1, x0 + x1, np.ones_like(x0)])) < abs(d) @ np.stack([y1 - y0, x1 - x0])
    hits &= (high[:, :1] > x0) & (low[:, :1] < x1)
    hits &= (high[:, 1:] > y0) & (low[:, 1:] < y1)
    return hits


def _crossings(boxes: np.ndarray, goal: Box) -> list[Point]:
    """Points where the boundary of the goal rectangle crosses that of a box and which no box covers."""
    x0, y0, x1, y1 = goal
    near = boxes[(boxes[:, 0] <= x1) & (boxes[:, 1] <= y1) & (boxes[:, 2] >= x0) & (boxes[:, 3] >= y0)].tolist()
    found = set()
    for left, low, right, high in near:
        found |= {(x, y) for x in (left, right) if x0 <= x <= x1 for y in (y0, y1) if low <= y <= high}
        found |= {(x, y) for y in (low, high) if y0 <= y <= y1 for x in (x0, x1) if left <= x <= right}
    return [p for p in sorted(found) if not any(_covers(box, p * 2) for box in near)]


def _timed(grown: GrownMap, points: list[Point], start: XY, t_start: float, hold_until: float, v_max: float) -> Path:
    """Put times to the points: full speed, each duration rounded up to the map's part of a second."""
    time, length, waypoints = _decimal(t_start), 0.0, [[t_start, *start]]
    for (x, y), (to_x, to_y) in pairwise(points):
        square = (to_x - x) ** 2 + (to_y - y) ** 2
        ticks2 = math.ceil(square * (Fraction(grown.ticks, grown.scale) / Fraction(_decimal(v_max))) ** 2)
        time += Decimal(math.isqrt(ticks2 - 1) + 1) / grown.ticks
        length += math.sqrt(square) / grown.scale
        waypoints.append([float(time), to_x / grown.scale, to_y / grown.scale])
    arrival, note = float(time), ""
    if hold_until > arrival:
        waypoints.append([hold_until, *waypoints[-1][1:]])
    elif hold_until < arrival:
        note = f"hold_until {hold_until} is before the arrival at {arrival}, so there is no waiting."
    return Path(length, waypoints, arrival, note)  # a hold_until of nan compares as neither


def _blocked(grown: GrownMap, start: Point, goal: Box, name: str, avoid: Sequence[str]) -> str:
    """Why the start or the goal alone rules a path out, or ""."""
    x0, y0, x1, y1 = grown.inside
    for what, spot in (("the start", start * 2), (name, goal)):
        if spot[0] > spot[2] or spot[1] > spot[3]:
            return f"the body, {2 * grown.radius / grown.scale} m wide, does not fit into {name} inside the workspace"
        if not (x0 <= spot[0] and y0 <= spot[1] and spot[2] <= x1 and spot[3] <= y1):
            x, y = (f"{c} in [{a / grown.scale}, {b / grown.scale}]" for c, a, b in (("x", x0, x1), ("y", y0, y1)))
            return f"the body at {what} is not inside the workspace, which asks for {x} and {y}"
        for i, box in enumerate(grown.grown):
            kind = "obstacle" if i < grown.n_obstacles else "avoided region"
            if _covers(box, spot) and (i < grown.n_obstacles or grown.names[i] in avoid):
                return f"the body at {what} overlaps {kind} {grown.names[i]}"
    return ""


def _covers(box: Box, spot: Box) -> bool:
    """Whether the open box holds all of the closed one."""
    return box[0] < spot[0] and box[1] < spot[1] and spot[2] < box[2] and spot[3] < box[3]


def _decimal(x: float) -> Decimal:
    return Decimal(repr(float(x)))


def _number(x: object, what: str, low: float = -1e9, high: float = 1e9) -> float:
    if isinstance(x, bool) or not isinstance(x, Real) or not low <= x <= high:
        raise ValueError(f"{what} must be a number between {low:.0f} and {high:.0f}, not {brief(x)}")
    return float(x)


def _point(value: object, what: str) -> XY:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
        raise ValueError(f"{what} must be two numbers [x, y] in metres, not {brief(value)}")
    return tuple(_number(x, f"{axis} of {what}") for axis, x in zip("xy", value, strict=True))


def _region(task: Task, name: object, what: str) -> str:
    if isinstance(name, str) and name in task.regions:
        return name
    kind = "is an obstacle, not a region" if isinstance(name, str) and name in task.obstacles else "is not a region"
    valid = ", ".join(task.regions) or "none"
    raise ValueError(f"{what}: {brief(name)} {kind}{nearest(name, task.regions)}; the regions are: {valid}")


_prepared = lru_cache(maxsize=64)(GrownMap)
