"""plan_path against brute force, an independent reachability test, the exact checker and checked cases."""

import heapq
import itertools
import json
import math
from decimal import Decimal
from pathlib import Path as File

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from stl import planner
from stl.monitor import check
from stl.planner import find_path, plan_path
from stl.world import Task

CASES = File(__file__).parent.parent / "cases" / "plan.jsonl"


def make(obstacles, regions, start, workspace=(0, 0, 10, 10), half_width=0.5, v_max=1, spec=()):
    return Task.from_json({
        "id": "test", "workspace": list(workspace), "robot": {"half_width": half_width, "v_max": v_max, "start": start},
        "obstacles": {f"W{i + 1}": list(box) for i, box in enumerate(obstacles)},
        "regions": {name: list(box) for name, box in regions.items()}, "spec": list(spec)})


def random_box(rng, step, low=1, high=8, limit=20):
    """A box on a grid of `step` metres, `limit` steps wide in all."""
    w, h = rng.integers(low, high, 2)
    x, y = rng.integers(0, limit - w + 1), rng.integers(0, limit - h + 1)
    return [round(v * step, 6) for v in (x, y, x + w, y + h)]


def random_task(rng, n_obstacles, step=0.5, half_width=0.5):
    """A map on so coarse a grid that gaps of exactly 2r, flush walls and meeting corners are common."""
    obstacles = [random_box(rng, step) for _ in range(n_obstacles)]
    regions = {"Goal": random_box(rng, step, 2), "A": random_box(rng, step), "B": random_box(rng, step)}
    start = [round(int(v) * step, 6) for v in rng.integers(1, 20, 2)]
    return make(obstacles, regions, start, half_width=half_width, workspace=(0, 0, 20 * step, 20 * step))


def grown(task, avoid, unit):
    """Grown obstacles, free workspace and start in integers of `unit` metres, worked out from decimals."""
    def whole(x):
        q = Decimal(str(x)) / Decimal(str(unit))
        assert q == int(q)
        return int(q)
    r = whole(task.robot.half_width)
    rects = [*task.obstacles.values(), *(task.regions[name] for name in avoid)]
    boxes = [(whole(a) - r, whole(b) - r, whole(c) + r, whole(d) + r) for a, b, c, d in rects]
    x0, y0, x1, y1 = map(whole, task.workspace)
    gx0, gy0, gx1, gy1 = map(whole, task.regions["Goal"])
    inside = (x0 + r, y0 + r, x1 - r, y1 - r)
    goal = (max(gx0 + r, inside[0]), max(gy0 + r, inside[1]), min(gx1 - r, inside[2]), min(gy1 - r, inside[3]))
    return boxes, inside, tuple(map(whole, task.robot.start)), goal


def blocked(point, boxes):
    return any(a < point[0] < c and b < point[1] < d for a, b, c, d in boxes)


def within(point, box):
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def reachable(boxes, inside, start, goal):
    """Cell decomposition: all sides cut the plane into vertices, open edges and open cells, each of them all free or
    all blocked; two free ones are joined where one lies in the closure of the other."""
    if not within(start, inside) or blocked(start, boxes) or goal[0] > goal[2] or goal[1] > goal[3]:
        return False
    axes = []
    for k in (0, 1):
        cuts = {v for box in (*boxes, inside, goal) for v in (box[k], box[k + 2])} | {start[k]}
        cuts = sorted(v for v in cuts if inside[k] <= v <= inside[k + 2])
        middles = [(a + b) / 2 for a, b in itertools.pairwise(cuts)]
        axes.append(sorted([*cuts, *middles]))  # even places are cuts, odd ones stand for open intervals
    xs, ys = axes
    place = (xs.index(start[0]), ys.index(start[1]))
    seen, stack = {place}, [place]
    while stack:
        i, j = stack.pop()
        if within((xs[i], ys[j]), goal):
            return True
        for di, dj in itertools.product((-1, 0, 1), repeat=2):
            u, v = i + di, j + dj
            if not (0 <= u < len(xs) and 0 <= v < len(ys)) or (u, v) in seen or blocked((xs[u], ys[v]), boxes):
                continue
            # along each axis that changes, one of the two is a cut; both changes must go the same way (cut to open)
            if di and dj and i % 2 != j % 2:
                continue
            seen.add((u, v))
            stack.append((u, v))
    return False


def brute_force(boxes, inside, start, goal):
    """Length of a shortest path by Dijkstra over all grown corners and all grid points of the goal's boundary, with
    shapely to decide what sees what (exact here: the coordinates are integers)."""
    if not within(start, inside) or blocked(start, boxes) or goal[0] > goal[2] or goal[1] > goal[3]:
        return math.inf
    if within(start, goal):
        return 0.0
    corners = {(x, y) for a, b, c, d in boxes for x in (a, c) for y in (b, d)}
    edge = {(x, y) for x in range(goal[0], goal[2] + 1) for y in range(goal[1], goal[3] + 1)
            if x in (goal[0], goal[2]) or y in (goal[1], goal[3])}
    nodes = [start, *sorted(p for p in corners | edge if within(p, inside) and not blocked(p, boxes) and p != start)]
    i, j = np.triu_indices(len(nodes), 1)
    xy = np.array(nodes, float)
    lines = shapely.linestrings(np.stack([xy[i], xy[j]], 1))
    sees = np.ones(len(lines), bool)
    for box in boxes:
        sees[sees] = ~shapely.relate_pattern(lines[sees], shapely.box(*box), "T********")
    length = np.full((len(nodes), len(nodes)), math.inf)
    length[i[sees], j[sees]] = length[j[sees], i[sees]] = np.hypot(*(xy[i] - xy[j])[sees].T)
    best, heap = {}, [(0.0, 0)]
    while heap:
        cost, v = heapq.heappop(heap)
        if v in best:
            continue
        best[v] = cost
        if nodes[v] in edge:
            return cost
        for w in np.flatnonzero(length[v] < math.inf):
            heapq.heappush(heap, (cost + length[v, w], int(w)))
    return math.inf


def passes(task, path):
    """The geometric part of the check, on the path as it is printed."""
    points = json.loads(json.dumps(path.waypoints))
    if points[0][0] > 0:
        points = [[0, *points[0][1:]], *points]
    verdict = check(task, points)
    assert verdict.ok, verdict.text


def test_checked_cases():
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        task = Task.from_json(case)
        goal = {f"goal_{kind}": value for kind, value in case["target"].items()}
        path, reason = find_path(task, case["robot"]["start"], avoid=case["avoid"], **goal)
        if case["length"] is None:
            assert path is None and reason, case["id"]
        else:
            assert path.length == pytest.approx(case["length"], abs=case["tol"]), case["id"]
            passes(task, path)
            assert judged(task, case["path"], case) and judged(task, [point[1:] for point in path.waypoints], case)


def judged(task, line, case):
    """Whether the checker lets the robot go along the polyline at full speed, to the target and round what to avoid."""
    path = [[0, *line[0]]]
    for a, b in itertools.pairwise(line):
        path.append([path[-1][0] + math.dist(a, b) / task.robot.v_max, *b])
    end = path[-1][0] + 1
    spec = [f"G[0,{end}] out({name})" for name in case["avoid"]]
    spec += [f"F[0,{end}] in({name})" for kind, name in case["target"].items() if kind == "region"]
    verdict = check(Task.from_json(case | {"spec": spec}), path)
    return verdict.ok and line[-1] == case["target"].get("point", line[-1])


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(i, marks=pytest.mark.slow) for i in range(60, 2000))])
def test_shortest_length_is_that_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    task = random_task(rng, int(rng.integers(2, 9)))
    avoid = [name for name in "AB" if rng.random() < 0.4]
    path = plan_path(task, task.robot.start, goal_region="Goal", avoid=avoid)
    best = brute_force(*grown(task, avoid, 0.25))
    assert (path is None) == (best == math.inf)
    if path:
        assert path.length == pytest.approx(best * 0.25, abs=1e-6)
        passes(task, path)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(i, marks=pytest.mark.slow) for i in range(10, 100))])
def test_no_path_means_unreachable(seed):
    rng = np.random.default_rng([seed, 1])
    found = 0
    for _ in range(40):
        task = random_task(rng, int(rng.integers(8, 22)))
        avoid = [name for name in "AB" if rng.random() < 0.3]
        path = plan_path(task, task.robot.start, goal_region="Goal", avoid=avoid)
        assert (path is not None) == reachable(*grown(task, avoid, 0.5))
        found += path is not None
    assert 2 < found < 38


@pytest.mark.parametrize("digits", [2, 4, 17])
def test_answers_pass_the_check_as_printed(digits):
    rng = np.random.default_rng(digits)
    found = 0
    for _ in range(60):
        size = rng.uniform(0.3, 4, (9, 2))
        low = rng.uniform(0, 10 - size)
        boxes = [[round(v, digits) for v in (*a, *(a + b))] for a, b in zip(low.tolist(), size, strict=True)]
        start = [round(v, digits) for v in rng.uniform(0.3, 9.7, 2)]
        half_width, v_max = round(rng.uniform(0.1, 0.3), digits), round(rng.uniform(0.2, 3), 3)
        task = make(boxes[:7], {"Goal": boxes[7], "A": boxes[8]}, start, half_width=half_width, v_max=v_max)
        avoid = ["A"] if rng.random() < 0.5 else []
        path = plan_path(task, start, round(rng.uniform(0, 50), digits), "Goal", avoid=avoid, hold_until=60)
        if path:
            found += 1
            passes(task, path)
            assert path.waypoints[0][1:] == start
            if digits == 2:
                assert all(v == round(v, 2) for point in path.waypoints for v in point)
    assert found > 15


def test_adding_an_obstacle_never_shortens():
    rng = np.random.default_rng(5)
    for _ in range(60):
        task = random_task(rng, 6)
        lengths = []
        for n in range(1, 7):
            part = make(list(task.obstacles.values())[:n], task.regions, task.robot.start)
            path = plan_path(part, part.robot.start, goal_region="Goal")
            lengths.append(path.length if path else math.inf)
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(lengths))


WALL_WITH_GAP = [(4, 0, 5, 4), (4, 5, 5, 10)]  # the gap is 1 m, the body's width


def test_a_gap_as_wide_as_the_body_is_passable():
    task = make(WALL_WITH_GAP, {"Goal": (8, 4, 9, 5)}, [1, 4.5])
    path = plan_path(task, [1, 4.5], goal_region="Goal")
    assert path.length == 7.5 and path.waypoints == [[0.0, 1.0, 4.5], [7.5, 8.5, 4.5]]
    narrower = make([(4, 0, 5, 4.01), (4, 5, 5, 10)], {"Goal": (8, 4, 9, 5)}, [1, 4.5])
    assert plan_path(narrower, [1, 4.5], goal_region="Goal") is None


def test_an_exact_gap_with_many_digits():
    at, r = 3.141592653589793, 0.2718281828459045
    top = float(Decimal(repr(at)) + 2 * Decimal(repr(r)))
    assert Decimal(repr(top)) == Decimal(repr(at)) + 2 * Decimal(repr(r))
    task = make([(4, 0, 5, at), (4, top, 5, 10)], {"Goal": (8, 2, 10, 5)}, [1, 1], half_width=r)
    path = plan_path(task, [1, 1], goal_region="Goal")
    assert path is not None
    passes(task, path)
    closed = make([(4, 0, 5, math.nextafter(at, 4)), (4, top, 5, 10)], {"Goal": (8, 2, 10, 5)}, [1, 1], half_width=r)
    assert plan_path(closed, [1, 1], goal_region="Goal") is None


def test_the_point_where_two_grown_corners_meet_is_passable():
    # Grown by 0.5, the boxes are [0, 5] x [5, 10] and [5, 10] x [0, 5], which meet at (5, 5).
    task = make([(0.5, 5.5, 4.5, 9.5), (5.5, 0.5, 9.5, 4.5)], {"Goal": (8, 8, 9, 9)}, [2, 2])
    path = plan_path(task, [2, 2], goal_region="Goal")
    assert path.length == pytest.approx(6.5 * math.sqrt(2))


def test_sliding_along_walls_and_the_workspace():
    task = make([(0, 1, 9, 10)], {"Goal": (9, 9, 10, 10)}, [0.5, 0.5])
    assert plan_path(task, [0.5, 0.5], goal_region="Goal").length == 18


def test_the_goal_may_be_partly_covered():
    # The wall leaves only the strip y >= 5 of the goal; the nearest point of it is where the wall's side crosses it.
    task = make([(3, 0, 10, 4.5)], {"Goal": (6, 2, 8, 8)}, [1, 1])
    path = plan_path(task, [1, 1], goal_region="Goal")
    assert path.waypoints[-1][1:] == [6.5, 5.0]


def test_regions_block_only_when_avoided():
    door = {"Goal": (8, 4, 9, 6), "Door": (4, 4, 5, 6)}
    task = make([(4, 0, 5, 4), (4, 6, 5, 10)], door, [1, 5])
    assert plan_path(task, [1, 5], goal_region="Goal").length == 7.5
    path, reason = find_path(task, [1, 5], goal_region="Goal", avoid=["Door"])
    assert path is None and "Door" in reason


def test_times_are_rounded_up_and_no_further():
    task = make([], {"Goal": (8, 8, 9, 9)}, [1, 1], v_max=0.3)
    assert plan_path(task, [1, 1], goal_point=[4, 1]).arrival == 10  # 3 / 0.3 in decimals, though not in doubles
    path = plan_path(task, [1, 1], 0.1, "Goal")
    (t0, *a), (t1, *b) = path.waypoints
    assert math.dist(a, b) <= 0.3 * (t1 - t0) + 1e-9
    assert math.dist(a, b) > 0.3 * (t1 - t0 - 0.01)
    assert t1 == round(t1, 2)


def test_holding():
    task = make([], {"Goal": (8, 8, 9, 9)}, [1, 1])
    held = plan_path(task, [1, 1], 2, goal_point=[4, 5], hold_until=30)
    assert held.waypoints == [[2, 1, 1], [7, 4, 5], [30, 4, 5]] and held.arrival == 7 and not held.note
    early = plan_path(task, [1, 1], 2, goal_point=[4, 5], hold_until=1)
    assert early.waypoints == [[2, 1, 1], [7, 4, 5]] and "before the arrival" in early.note
    assert plan_path(task, [1, 1], 2, goal_point=[4, 5], hold_until=7) == plan_path(task, [1, 1], 2, goal_point=[4, 5])


def test_a_start_in_the_goal_stays():
    task = make([], {"Goal": (0, 0, 9, 9)}, [1, 1])
    assert plan_path(task, [1, 1], 4, "Goal") == planner.Path(0.0, [[4, 1, 1]], 4.0)
    assert plan_path(task, [1, 1], 4, "Goal", hold_until=6).waypoints == [[4, 1, 1], [6, 1, 1]]


@pytest.mark.parametrize("query, word", [
    (dict(start=[0.4, 5], goal_region="Goal"), "workspace"),
    (dict(start=[4, 2], goal_region="Goal"), "the start overlaps obstacle W1"),
    (dict(start=[1, 5], goal_region="Goal", avoid=["Home"]), "the start overlaps avoided region Home"),
    (dict(start=[1, 5], goal_region="Small"), "does not fit into Small"),
    (dict(start=[1, 5], goal_region="Goal", avoid=["Goal"]), "Goal overlaps avoided region Goal"),
    (dict(start=[1, 5], goal_point=[4.5, 2]), "obstacle W1"),
    (dict(start=[1, 5], goal_point=[20, 2]), "workspace"),
    (dict(start=[1, 1], goal_region="Goal", avoid=["Home", "Gap"]), "Gap"),
])
def test_why_there_is_no_path(query, word):
    regions = {"Goal": (8, 4, 9, 5), "Home": (0, 4, 2, 6), "Small": (7, 7, 7.9, 9), "Gap": (4, 4, 5, 5)}
    task = make(WALL_WITH_GAP, regions, [1, 5])
    path, reason = find_path(task, **query)
    assert path is None and word in reason
    assert plan_path(task, **query) is None


@pytest.mark.parametrize("query, word", [
    (dict(goal_region="Gaol"), "did you mean 'Goal'"),
    (dict(goal_region="W1"), "an obstacle, not a region"),
    (dict(goal_region="Goal", avoid=["W2"]), "avoid"),
    (dict(goal_region="Goal", avoid="Goal"), "list"),
    (dict(goal_region="Goal", avoid=[["Goal"]]), "avoid"),
    (dict(goal_region="Goal", goal_point=[1, 1]), "either"),
    (dict(), "either"),
    (dict(goal_region="Goal", t_start=-1), "t_start"),
    (dict(goal_region="Goal", t_start=1e300), "t_start"),
    (dict(goal_region="Goal", t_start=True), "t_start"),
    (dict(goal_region="Goal", hold_until="soon"), "hold_until"),
    (dict(goal_point=[1, math.nan]), "y of goal_point"),
    (dict(goal_point=[1, 2, 3]), "goal_point"),
    (dict(goal_point="12"), "goal_point"),
    (dict(goal_region="Goal", start=[math.inf, 1]), "x of start"),
    (dict(goal_region="Goal", start={0: 1, 1: 1}), "start"),
])
def test_bad_arguments(query, word):
    task = make(WALL_WITH_GAP, {"Goal": (8, 4, 9, 5)}, [1, 5])
    with pytest.raises(ValueError, match=word) as error:
        plan_path(task, **{"start": [1, 5], **query})
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_many_regions():
    """More regions than an int64 has bits."""
    regions = {f"R{i}": (4, i / 10, 5, (i + 1) / 10) for i in range(100)} | {"Goal": (8, 4, 9, 5)}
    task = make([], regions, [1, 5])
    every = [f"R{i}" for i in range(100)]
    assert plan_path(task, [1, 5], goal_region="Goal", avoid=every) is None
    assert plan_path(task, [1, 5], goal_region="Goal", avoid=every[:90]).length > 8
    assert plan_path(task, [1, 5], goal_region="Goal").length == pytest.approx(math.hypot(7.5, 0.5))


def test_a_large_map_finds_edges_as_it_goes():
    rng = np.random.default_rng(0)
    obstacles = [random_box(rng, 0.25, 1, 3, 160) for _ in range(150)]
    task = make(obstacles, {"Goal": (38, 38, 40, 40)}, [1, 1], workspace=(0, 0, 40, 40), half_width=0.2)
    eager = planner.EAGER
    lazy_path = plan_path(task, [1, 1], goal_region="Goal")
    try:
        planner.EAGER = 10_000
        planner._prepared.cache_clear()
        assert plan_path(task, [1, 1], goal_region="Goal") == lazy_path
    finally:
        planner.EAGER = eager
        planner._prepared.cache_clear()


def test_maps_are_kept_but_not_for_ever():
    for i in range(100):
        plan_path(make([(3, 3, 4, 4 + i / 100)], {"Goal": (8, 8, 9, 9)}, [1, 1]), [1, 1], goal_region="Goal")
    info = planner._prepared.cache_info()
    assert info.currsize <= info.maxsize < 100


@settings(max_examples=100, deadline=None)
@given(st.floats(0.5, 9.5), st.floats(0.5, 9.5), st.integers(0, 9))
def test_a_start_finer_than_the_grid(x, y, places):
    task = make(WALL_WITH_GAP, {"Goal": (8, 4, 9, 5)}, [round(x, places), round(y, places)])
    path = plan_path(task, task.robot.start, goal_region="Goal")
    if path:
        passes(task, path)
