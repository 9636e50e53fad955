"""Maps before they have clauses: rooms with boxes, mazes, and key-door mazes.

Everything is drawn in whole centimetres on a 5 cm grid, so that the metres of a task are exact two-decimal numbers.
All randomness comes from the `random.Random` that is handed in.
"""

from dataclasses import dataclass, field
from random import Random

from stl.world import Rect

Box = tuple[int, int, int, int]  # xmin, ymin, xmax, ymax in centimetres
Edge = tuple[int, int]  # two adjacent cells u < v; cell = column + side * row
GRID = 5


@dataclass
class Map:
    """A map in centimetres; `keys` are the keys of a key-door maze in an order in which they can be collected."""

    size: int
    half_width: int
    start: tuple[int, int]
    obstacles: dict[str, Box] = field(default_factory=dict)
    regions: dict[str, Box] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)


def rect(box: Box) -> Rect:
    """The same rectangle in metres."""
    return Rect(*(c / 100 for c in box))


def on_grid(rng: Random, low: int, high: int) -> int:
    """A multiple of the grid between low and high, both included."""
    return GRID * rng.randint(-(-low // GRID), high // GRID)


def scatter(rng: Random, count: int, sides: tuple[int, int], area: Box, taken: list[Box], gap: int) -> list[Box]:
    """Up to `count` boxes in `area`, at least `gap` away from each other and from `taken`; fewer if space is scarce."""
    boxes: list[Box] = []
    for _ in range(count * 20):
        if len(boxes) == count:
            break
        w, h = on_grid(rng, *sides), on_grid(rng, *sides)
        x, y = on_grid(rng, area[0], area[2] - w), on_grid(rng, area[1], area[3] - h)
        if all(x - gap >= b[2] or x + w + gap <= b[0] or y - gap >= b[3] or y + h + gap <= b[1] for b in taken + boxes):
            boxes.append((x, y, x + w, y + h))
    return boxes


def room(rng: Random, size: int, half_width: int, obstacles: int, box_sides: tuple[int, int], sides: tuple[int, int],
         order: list[int], hops: list[int]) -> Map | None:
    """A square room with max(order) + 1 regions, visited in that order, and a hazard in the way of each hop in `hops`.

    Gaps of more than the body's width keep every part reachable. None when there was not enough room (draw again).
    """
    r, area, gap = half_width, (0, 0, size, size), 2 * half_width + 2 * GRID
    x, y = on_grid(rng, r, size - r), on_grid(rng, r, size - r)
    taken = [(x - r, y - r, x + r, y + r)]
    taken += scatter(rng, max(order) + 1, sides, area, taken, gap)
    for hop in hops:
        (x0, y0, x1, y1), (x2, y2, x3, y3) = taken[order[hop - 1] + 1 if hop else 0], taken[order[hop] + 1]
        mx, my = (x0 + x1 + x2 + x3) // 4, (y0 + y1 + y2 + y3) // 4
        around = (max(0, mx - sides[1]), max(0, my - sides[1]), min(size, mx + sides[1]), min(size, my + sides[1]))
        taken += scatter(rng, 1, (sides[1] * 3 // 4, sides[1]), around, taken, gap)
    if len(taken) < max(order) + 2 + len(hops):
        return None
    boxes = scatter(rng, obstacles, box_sides, area, taken, gap)
    return Map(size, r, (x, y), _named("W", boxes), _lettered(rng, taken[1:]))


def maze(rng: Random, side: int, cell: int, wall: int, half_width: int, loops: float, order: list[int],
         hops: list[int]) -> Map | None:
    """As room, in a maze of side x side cells; a share `loops` of its inner walls is taken out."""
    tree = spanning_tree(rng, side)
    closed = [e for e in _edges(side) if e not in tree and rng.random() >= loops]
    cells = rng.sample(range(side * side), max(order) + 2)
    start = cells[0]
    for hop in hops:
        parent, _ = _search(set(_edges(side)).difference(closed), side, cells[order[hop - 1] + 1] if hop else start)
        between = [c for c in _way(parent, cells[order[hop] + 1]) if c not in cells]
        if not between:
            return None
        cells.append(rng.choice(between))
    places = [_box_in_cell(rng, c, side, cell, wall, 2 * half_width + 40) for c in cells[1:]]
    return Map(side * cell, half_width, _middle(start, side, cell), _named("W", walls(side, closed, cell, wall)),
               _lettered(rng, places))


def key_door_maze(rng: Random, side: int, cell: int, wall: int, half_width: int, doors: int, shortcuts: int,
                  nested: int) -> Map | None:
    """A perfect maze with keys, doors and a goal; None when this draw does not work out (draw again).

    All doors but `shortcuts` stand in passages of the maze: walls and that one locked door separate the start from
    something needed. A shortcut door stands in a gap between two cells that are far apart otherwise, on the shortest
    way to some key. At least `nested` keys lie behind other doors (0: none does).
    """
    tree = spanning_tree(rng, side)
    start = rng.randrange(side * side)
    parent, depth = _search(tree, side, start)
    inner = rng.sample([c for c in parent if depth[c] > 1], doors - shortcuts)  # a door before each
    room_of = {start: start}  # cell -> the cell behind the last door on the way to it
    for c in parent:
        room_of[c] = c if c in inner else room_of[parent[c]]
    free = {r: [c for c in room_of if room_of[c] == r and c != start] for r in [start, *inner]}

    opened, keys = [start], []  # keys: (cell of the key, its door as an edge), in an order of collecting
    while len(opened) <= len(inner):
        door = rng.choice([c for c in inner if c not in opened and room_of[parent[c]] in opened])
        home = start if not nested else opened[-1] if rng.random() < 0.6 else rng.choice(opened)
        if not free[home]:
            return None
        keys.append((free[home].pop(rng.randrange(len(free[home]))), (parent[door], door)))
        opened.append(door)
    if not free[opened[-1]]:
        return None
    goal = rng.choice(free[opened[-1]])
    useful = {c for item in [goal, *(k for k, _ in keys)] for c in _way(parent, item)}  # cells on the way to something
    if not useful.issuperset(inner) or sum(room_of[k] != start for k, _ in keys) < nested:
        return None
    for _ in range(shortcuts):
        if not _add_shortcut(rng, side, keys, goal, parent, depth, room_of):
            return None
    return _lay_out(rng, side, cell, wall, half_width, tree, start, keys, goal)


def _add_shortcut(rng, side, keys, goal, parent, depth, room_of) -> bool:
    """Insert a key whose door makes the way to an earlier key at least four cells shorter."""
    ways = {c: i for i, (k, _) in reversed(list(enumerate(keys))) for c in _way(parent, k)}  # the first key behind
    used = {door for _, door in keys}
    gaps = [(u, v) for a, b in _edges(side) for u, v in ((a, b), (b, a))
            if v in ways and depth[v] - depth[u] >= 5 and room_of[u] == room_of[v] and (u, v) not in used]
    if not gaps:
        return False
    door = rng.choice(gaps)
    place = rng.randint(ways[door[1]] + 1, len(keys))
    taken = {goal, *(k for k, _ in keys)}
    reached = {room_of[k] for k, _ in keys[:place]}
    homes = [c for c in parent if room_of[c] in reached and c not in taken]
    if not homes:
        return False
    keys.insert(place, (rng.choice(homes), door))
    return True


def _lay_out(rng, side, cell, wall, half_width, tree, start, keys, goal) -> Map:
    """Draw the chosen cells and edges as rectangles; key and door numbers do not tell the order."""
    doors = {tuple(sorted(door)) for _, door in keys}
    closed = [e for e in _edges(side) if e not in tree and e not in doors]
    numbers = rng.sample(range(1, len(keys) + 1), len(keys))
    regions = {}
    for n, (key, door) in sorted(zip(numbers, keys, strict=True)):
        regions[f"Key{n}"] = _box_in_cell(rng, key, side, cell, wall, 2 * half_width + 20)
        regions[f"Door{n}"] = _gap(tuple(sorted(door)), side, cell, wall)
    regions["Goal"] = _box_in_cell(rng, goal, side, cell, wall, 2 * half_width + 20)
    obstacles = _named("W", walls(side, closed, cell, wall))
    return Map(side * cell, half_width, _middle(start, side, cell), obstacles, regions, [f"Key{n}" for n in numbers])


def spanning_tree(rng: Random, side: int) -> set[Edge]:
    """The passages of a perfect maze: a random spanning tree of the grid by Kruskal's algorithm."""
    edges = _edges(side)
    rng.shuffle(edges)
    root = list(range(side * side))

    def find(c: int) -> int:
        while root[c] != c:
            root[c] = c = root[root[c]]
        return c

    tree = set()
    for u, v in edges:
        a, b = find(u), find(v)
        if a != b:
            root[a] = b
            tree.add((u, v))
    return tree


def walls(side: int, closed: list[Edge], cell: int, wall: int) -> list[Box]:
    """One box for each maximal straight run of closed edges, half a wall longer at both ends, cut at the workspace."""
    shut, boxes, half, size = set(closed), [], wall // 2, side * cell
    for line in range(1, side):
        for upright in (True, False):
            run = 0
            for i in range(side + 1):
                u, step = (line - 1 + side * i, 1) if upright else (i + side * (line - 1), side)
                if i < side and (u, u + step) in shut:
                    run += 1
                elif run:
                    low, high = max(0, (i - run) * cell - half), min(size, i * cell + half)
                    a, b = line * cell - half, line * cell + half
                    boxes.append((a, low, b, high) if upright else (low, a, high, b))
                    run = 0
    return boxes


def _gap(edge: Edge, side: int, cell: int, wall: int) -> Box:
    """What fills the gap of an open edge from post to post, or to the border of the workspace."""
    u, v = edge
    x, y, half, size = v % side * cell, v // side * cell, wall // 2, side * cell

    def ends(low: int) -> tuple[int, int]:
        return (low + half if low else 0), (low + cell - half if low + cell < size else size)

    if v == u + 1:
        return (x - half, ends(y)[0], x + half, ends(y)[1])
    return (ends(x)[0], y - half, ends(x)[1], y + half)


def _edges(side: int) -> list[Edge]:
    across = [(c, c + 1) for c in range(side * side) if (c + 1) % side]
    return across + [(c, c + side) for c in range(side * (side - 1))]


def _search(tree: set[Edge], side: int, start: int) -> tuple[dict[int, int], dict[int, int]]:
    """Parent and depth of every cell but the start (which has depth only), breadth first."""
    near: dict[int, list[int]] = {c: [] for c in range(side * side)}
    for u, v in sorted(tree):
        near[u].append(v)
        near[v].append(u)
    parent, depth, queue = {}, {start: 0}, [start]
    for c in queue:
        for n in near[c]:
            if n not in depth:
                parent[n], depth[n] = c, depth[c] + 1
                queue.append(n)
    return parent, depth


def _way(parent: dict[int, int], cell: int) -> list[int]:
    """The cells from the start (left out) to `cell`, backwards."""
    way = []
    while cell in parent:
        way.append(cell)
        cell = parent[cell]
    return way


def _box_in_cell(rng: Random, c: int, side: int, cell: int, wall: int, smallest: int) -> Box:
    x, y, half = c % side * cell, c // side * cell, wall // 2
    inner = (x + half, y + half, x + cell - half, y + cell - half)
    return scatter(rng, 1, (smallest, max(smallest, (cell - wall) * 3 // 4)), inner, [], 0)[0]


def _middle(c: int, side: int, cell: int) -> tuple[int, int]:
    return c % side * cell + cell // 2, c // side * cell + cell // 2


def _lettered(rng: Random, boxes: list[Box]) -> dict[str, Box]:
    """Letters that do not tell the order."""
    return dict(zip(rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(boxes)], len(boxes)), boxes, strict=True))


def _named(letter: str, boxes: list[Box]) -> dict[str, Box]:
    return {f"{letter}{i}": box for i, box in enumerate(boxes, 1)}
