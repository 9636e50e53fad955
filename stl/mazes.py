"""Maps before they have formulas: rooms with boxes, mazes, and key-door mazes.

Everything is drawn in whole centimetres on a 5 cm grid, so that the metres of a task are exact two-decimal numbers.
All randomness comes from the `random.Random` that is handed in. A draw that does not work out raises Redraw.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from random import Random

from stl.world import Rect, Robot, Task

Box = tuple[int, int, int, int]  # xmin, ymin, xmax, ymax in centimetres
Edge = tuple[int, int]  # two adjacent cells u < v
Range = tuple[int, int]  # lowest and highest
GRID = 5
WALL = 20  # thickness of a maze's walls
LOOPS = 0.15  # share of a perfect maze's walls that is taken out


class Redraw(Exception):
    """This draw came to nothing; the next one of the same stream is to be taken."""


def room(rng: Random, size: int, half_width: int, obstacles: Range, boxes: Range, sides: Range, order: list[int],
         hops: list[int]) -> tuple[Task, list[str]]:
    """A square room with max(order) + 1 regions, to be visited in that order, and a hazard in the way of each hop in
    `hops`, that is, on the line to order[hop]. Returns it with the names of the regions and then the hazards.

    Gaps wider than the body keep every part reachable.
    """
    gap, area = 2 * half_width + 2 * GRID, (0, 0, size, size)
    start = on_grid(rng, half_width, size - half_width), on_grid(rng, half_width, size - half_width)
    home = [_around(*start, half_width)]
    places = scatter(rng, max(order) + 1, sides, area, home, gap)
    if len(places) <= max(order):
        raise Redraw
    stops = home + [places[i] for i in order]
    for hop in hops:
        x, y = (sum(box[i] + box[i + 2] for box in stops[hop : hop + 2]) // 4 for i in (0, 1))
        near = scatter(rng, 1, (sides[1] * 3 // 4, sides[1]), _around(x, y, sides[1], size), home + places, gap)
        places.append(pick(rng, near))
    walls = scatter(rng, rng.randint(*obstacles), boxes, area, home + places, gap)
    return _task(rng, size, half_width, 1.0, start, walls, places)


def maze(rng: Random, side: Range, cell: Range, order: list[int], hops: list[int]) -> tuple[Task, list[str]]:
    """As room, in a maze; a share of the walls of a perfect maze is taken out. Ranges: cells, decimetres."""
    grid = Grid(rng.randint(*side), 10 * rng.randint(*cell))
    tree = grid.tree(rng)
    closed = [edge for edge in grid.edges() if edge not in tree and rng.random() >= LOOPS]
    cells = rng.sample(range(grid.side**2), max(order) + 2)
    start, passages = cells.pop(), set(grid.edges()).difference(closed)
    for hop in hops:
        parent, _ = grid.search(passages, cells[order[hop - 1]] if hop else start)
        cells.append(pick(rng, [c for c in _way(parent, cells[order[hop]]) if c not in cells and c != start]))
    places = [grid.place(rng, c, 100) for c in cells]
    return _task(rng, grid.side * grid.cell, 30, 1.0, grid.middle(start), grid.walls(closed), places)


def key_door_maze(rng: Random, side: Range, cell: Range, doors: int, shortcuts: int,
                  nested: int) -> tuple[Task, list[str]]:
    """A perfect maze with keys, doors and a goal, and the keys' names in an order in which they can be collected.

    All doors but `shortcuts` stand in passages of the maze: the walls and that locked door alone separate the start
    from something needed. A shortcut door stands in a gap between two cells that are far apart otherwise, on the
    shortest way to some key. At least `nested` keys lie behind doors; with 0, none does.
    """
    grid = Grid(rng.randint(*side), 10 * rng.randint(*cell))
    tree, start = grid.tree(rng), rng.randrange(grid.side**2)
    keys, gates, goal = _lock(rng, grid, *grid.search(tree, start), doors - shortcuts, shortcuts, nested)
    passages = tree.union(gates)
    free = grid.search(passages, start)[1]
    for gate in gates:  # something needed is not reached without it, or by at least four cells more
        kept = grid.search(passages - {gate}, start)[1]
        if all(kept.get(c, grid.side**2) < free[c] + 4 for c in (*keys, goal)):
            raise Redraw
    closed = [edge for edge in grid.edges() if edge not in passages]
    numbers = rng.sample(range(1, doors + 1), doors)  # do not tell the order
    names = [f"{word}{n}" for word in ("Key", "Door") for n in numbers] + ["Goal"]
    places = [grid.place(rng, c, 60) for c in (*keys, goal)]
    places[doors:doors] = [grid.door(gate) for gate in gates]
    size, walls = grid.side * grid.cell, grid.walls(closed)
    return _task(rng, size, 20, 0.5, grid.middle(start), walls, places, names)[0], names[:doors]


def _lock(rng: Random, grid: Grid, parent: dict[int, int], depth: dict[int, int], doors: int, shortcuts: int,
          nested: int) -> tuple[list[int], list[Edge], int]:
    """The cells of the keys, in order, the edges of their doors, and the cell of the goal."""
    behind = rng.sample([c for c in parent if depth[c] > 1], doors)  # a door leads to each of these cells
    part = {c: 0 for c in depth}  # 0 before all doors, else 1 + the number of the last door on the way to the cell
    for c in parent:
        part[c] = 1 + behind.index(c) if c in behind else part[parent[c]]
    opened, keys, gates = [0], [], []

    def free_cell(parts: list[int], *taken: int) -> int:
        return pick(rng, [c for c in parent if part[c] in parts and c not in keys and c not in taken])

    while len(gates) < doors:
        beyond = pick(rng, [c for c in behind if part[c] not in opened and part[parent[c]] in opened])
        keys.append(free_cell([0] if not nested else opened[-1:] if rng.random() < 0.6 else opened))
        gates.append((min(parent[beyond], beyond), max(parent[beyond], beyond)))
        opened.append(part[beyond])
    goal = free_cell(opened[-1:])
    if sum(part[c] > 0 for c in keys) < nested:
        raise Redraw
    for _ in range(shortcuts):  # on the way to a key that comes before the shortcut's own
        first = {c: i for i, key in reversed([*enumerate(keys)]) for c in _way(parent, key)}
        u, v = pick(rng, [(u, v) for a, b in grid.edges() for u, v in ((a, b), (b, a)) if v in first
                          and depth[v] - depth[u] >= 5 and part[u] == part[v] and (a, b) not in gates])
        place = rng.randint(first[v] + 1, len(keys))
        keys.insert(place, free_cell([part[c] for c in keys[:place]], goal))
        gates.insert(place, (min(u, v), max(u, v)))
    return keys, gates, goal


@dataclass(frozen=True)
class Grid:
    """side x side square cells of `cell` cm with walls between them; number = column + side * row."""

    side: int
    cell: int

    def edges(self) -> list[Edge]:
        n = self.side
        return [(c, c + 1) for c in range(n * n) if (c + 1) % n] + [(c, c + n) for c in range(n * n - n)]

    def tree(self, rng: Random) -> set[Edge]:
        """The passages of a perfect maze: a random spanning tree (Kruskal's algorithm)."""
        tree, group = set(), list(range(self.side**2))
        for u, v in rng.sample(edges := self.edges(), len(edges)):
            if group[u] != group[v]:
                tree.add((u, v))
                group = [group[u] if g == group[v] else g for g in group]
        return tree

    def search(self, passages: set[Edge], start: int) -> tuple[dict[int, int], dict[int, int]]:
        """Parent and depth of the cells, breadth first; the start has no parent."""
        near = defaultdict(list)
        for u, v in sorted(passages):
            near[u].append(v)
            near[v].append(u)
        parent, depth, queue = {}, {start: 0}, [start]
        for c in queue:
            for n in near[c]:
                if n not in depth:
                    parent[n], depth[n] = c, depth[c] + 1
                    queue.append(n)
        return parent, depth

    def _line(self, edge: Edge) -> tuple[bool, int, int]:
        """Where the wall of an edge stands: upright or not, on which grid line, at which place along it."""
        u, v = edge
        row, column = divmod(v, self.side)
        return (True, column, row) if v == u + 1 else (False, row, column)

    def _bar(self, upright: bool, line: int, first: int, last: int, more: int) -> Box:
        """A bar of a wall's thickness along a grid line, `more` longer at each end that is inside the workspace."""
        low, high = first * self.cell - (more if first else 0), last * self.cell + (more if last < self.side else 0)
        a, b = line * self.cell - WALL // 2, line * self.cell + WALL // 2
        return (a, low, b, high) if upright else (low, a, high, b)

    def walls(self, closed: list[Edge]) -> list[Box]:
        """One box for each longest straight run of closed edges."""
        lines = defaultdict(set)
        for edge in closed:
            upright, line, i = self._line(edge)
            lines[upright, line].add(i)
        boxes = []
        for (upright, line), shut in sorted(lines.items()):
            for first in sorted(i for i in shut if i - 1 not in shut):
                last = next(i for i in range(first, self.side + 1) if i not in shut)
                boxes.append(self._bar(upright, line, first, last, WALL // 2))
        return boxes

    def door(self, edge: Edge) -> Box:
        """What fills the gap of an open edge, from wall to wall."""
        upright, line, i = self._line(edge)
        return self._bar(upright, line, i, i + 1, -WALL // 2)

    def place(self, rng: Random, c: int, smallest: int) -> Box:
        """A region inside a cell."""
        inner = self.cell - WALL
        return scatter(rng, 1, (smallest, inner * 3 // 4), _around(*self.middle(c), inner // 2), [], 0)[0]

    def middle(self, c: int) -> tuple[int, int]:
        return c % self.side * self.cell + self.cell // 2, c // self.side * self.cell + self.cell // 2


def on_grid(rng: Random, low: int, high: int) -> int:
    """A multiple of the grid between low and high, both included."""
    return GRID * rng.randint(-(-low // GRID), high // GRID)


def scatter(rng: Random, count: int, sides: Range, area: Box, taken: list[Box], gap: int) -> list[Box]:
    """Boxes in `area`, at least `gap` away from each other and from `taken`; fewer than `count` if space is scarce."""
    boxes: list[Box] = []
    for _ in range(count * 20):
        w, h = on_grid(rng, *sides), on_grid(rng, *sides)
        x, y = on_grid(rng, area[0], area[2] - w), on_grid(rng, area[1], area[3] - h)
        if all(x - gap >= b[2] or x + w + gap <= b[0] or y - gap >= b[3] or y + h + gap <= b[1] for b in taken + boxes):
            boxes.append((x, y, x + w, y + h))
        if len(boxes) == count:
            break
    return boxes


def _around(x: int, y: int, reach: int, size: int = 10**6) -> Box:
    """The square around a point, cut at a workspace of `size`."""
    return max(0, x - reach), max(0, y - reach), min(size, x + reach), min(size, y + reach)


def _way(parent: dict[int, int], cell: int) -> list[int]:
    """The cells from the start (left out) to `cell`, backwards."""
    way = []
    while cell in parent:
        way.append(cell)
        cell = parent[cell]
    return way


def pick(rng: Random, options: list):
    """One of the options; Redraw if there are none."""
    if not options:
        raise Redraw
    return rng.choice(options)


def _task(rng: Random, size: int, half_width: int, v_max: float, start: tuple[int, int], walls: list[Box],
          places: list[Box], names: list[str] | None = None) -> tuple[Task, list[str]]:
    """The map in metres and the names of its places, which do not tell the order."""
    names = names or rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(places)], len(places))
    robot = Robot(half_width / 100, v_max, (start[0] / 100, start[1] / 100))
    regions = dict(sorted(zip(names, map(_rect, places), strict=True)))
    obstacles = {f"W{i}": _rect(box) for i, box in enumerate(walls, 1)}
    return Task("map", _rect((0, 0, size, size)), robot, obstacles, regions), names


def _rect(box: Box) -> Rect:
    return Rect(*(c / 100 for c in box))
