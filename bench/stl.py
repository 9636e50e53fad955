"""How fast the task world is, beside its peers on the same inputs in the same run; prints ratios.

    python bench/stl.py                   # about a minute; --tasks 40 for more maps
    pip install shapely rtamt pyvisgraph extremitypathfinder      # the peers; each one is skipped where it is missing

CPU time of one core, in ms (making tasks: wall time of all cores). The peers of plan_path work on merged polygons, so
that gaps of exactly the body's width are closed for them, and they go from point to point only; both sides are given
the same maps, starts and goal points.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import sys
import time
import warnings
from collections import Counter
from itertools import pairwise
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from stl.expert import solve
from stl.formula import And, F, G, In, Or, Out, Until, parse
from stl.levels import RL_COUNTS, make_task
from stl.monitor import check
from stl.planner import GrownMap, plan_path, prepared
from stl.tools import call_tool
from stl.world import Task


def clock(call, *args, **keywords):
    """The result of a call and its CPU milliseconds."""
    began = time.process_time()
    result = call(*args, **keywords)
    return result, 1e3 * (time.process_time() - began)


def line(name: str, ms: list[float], ours: float | None = None) -> float:
    mean = float(np.mean(ms)) if ms else float("nan")
    ratio = f"   {mean / ours:7.1f} x ours" if ours else ""
    print(f"  {name:52} mean {mean:8.3f}   worst {max(ms, default=float('nan')):8.3f}   n {len(ms):5}{ratio}")
    return mean


def have(*modules: str) -> bool:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(f"  (skipped: {', '.join(missing)} not installed)")
    return not missing


def bench_queries(tasks: list[Task]) -> None:
    print("\nplan_path and check_path on L8")
    load, queries, checks = [], [], []
    for task in tasks:
        data = json.dumps(task.to_json())
        loaded, ms = clock(lambda text: Task.from_json(json.loads(text)), data)
        named = tuple(loaded.obstacles.items()), tuple(loaded.regions.items())
        load.append(ms + clock(GrownMap, loaded.workspace, loaded.robot.half_width, *named)[1])
        prepared(loaded)
        here = task.robot.start
        for leg in task.plan:
            path, ms = clock(plan_path, loaded, here, **leg)
            queries.append(ms)
            here = path.waypoints[-1][1:]
        checks += [clock(check, loaded, task.witness)[1] for _ in range(3)]
    line("load a task and prepare its map", load)
    line("plan_path, the legs of the known solutions", queries)
    line("check_path, the known solutions", checks)


def free_polygons(task: Task, avoid: tuple[str, ...], start: tuple, goal: tuple):
    """The free space as one shapely polygon with holes, and the union of the grown obstacles. Of the latter, what
    reaches the workspace's border goes on for 1 km, because pyvisgraph knows no border and would walk round it."""
    import shapely
    r = task.robot.half_width
    inside = task.workspace.grown(-r)
    boxes = [rect.grown(r) for rect in (*task.obstacles.values(), *(task.regions[name] for name in avoid))]
    free = shapely.box(*inside) - shapely.union_all([shapely.box(*box) for box in boxes])
    far = [[a - 1000 * (a <= w), b - 1000 * (b <= s), c + 1000 * (c >= e), d + 1000 * (d >= n)]
           for (a, b, c, d), (w, s, e, n) in ((box, inside) for box in boxes)]
    for part in getattr(free, "geoms", [free]):
        if part.contains(shapely.Point(start)) and part.contains(shapely.Point(goal)):
            return part, shapely.union_all([shapely.box(*box) for box in far])
    return None, None


def visgraph(part, walls):
    import pyvisgraph as vg
    rings = [ring for p in getattr(walls, "geoms", [walls]) for ring in (p.exterior, *p.interiors)]
    graph = vg.VisGraph()
    _, build = clock(graph.build, [[vg.Point(x, y) for x, y in ring.coords[:-1]] for ring in rings], status=False)

    def query(start, goal):
        points = graph.shortest_path(vg.Point(*start), vg.Point(*goal))
        return sum(math.dist((a.x, a.y), (b.x, b.y)) for a, b in pairwise(points))
    return build, query


def extremity(part, walls):
    from extremitypathfinder import PolygonEnvironment
    world = PolygonEnvironment()
    outer, *holes = [list(ring.coords)[:-1] for ring in (part.exterior, *part.interiors)]
    outer = outer if part.exterior.is_ccw else outer[::-1]
    holes = [hole[::-1] if ring.is_ccw else hole for hole, ring in zip(holes, part.interiors, strict=True)]
    _, build = clock(lambda: (world.store(outer, holes, validate=False), world.prepare()))
    return build, lambda start, goal: world.find_shortest_path(start, goal)[1]


PEERS = {"pyvisgraph": visgraph, "extremitypathfinder": extremity}


def bench_peers(tasks: list[Task], per_map: int) -> None:
    print("\nplan_path and peers: point to point in L8 mazes, nothing avoided; then another avoid list at each query")
    if not have("shapely", "pyvisgraph", "extremitypathfinder"):
        return
    rng = random.Random(0)
    build, query, changed = ({name: [] for name in ("ours", *PEERS)} for _ in range(3))
    differ = {peer: Counter() for peer in PEERS}
    for task in tasks:
        prepared(task)
        doors = [name for name in task.regions if name.startswith("Door")]
        spots = [rect for name, rect in task.regions.items() if not name.startswith("Door")]
        ends = [(round((a.xmin + a.xmax) / 2, 2), round((a.ymin + a.ymax) / 2, 2)) for a in spots]
        made = {}
        for _ in range(per_map):
            start, goal = rng.sample(ends, 2)
            for avoid in ((), tuple(rng.sample(doors, rng.randint(1, 2)))):
                part, walls = free_polygons(task, avoid, start, goal)
                path, ms = clock(plan_path, task, start, 0, None, goal, avoid)
                if part is None or path is None:
                    continue
                (changed if avoid else query)["ours"].append(ms)
                for peer, make in PEERS.items():
                    if avoid or peer not in made:
                        made_now = make(part, walls)
                    if not avoid and peer not in made:
                        made[peer] = made_now[1]
                        build[peer].append(made_now[0])
                    length, ms = clock(made_now[1] if avoid else made[peer], start, goal)
                    (changed if avoid else query)[peer].append(ms + (made_now[0] if avoid else 0))
                    error = math.inf if length is None else length - path.length
                    differ[peer]["none" if error == math.inf else "longer" if error > 1e-6 else
                                 "shorter, so through a wall" if error < -1e-6 else "equal"] += 1
    ours = line("ours, a query", query["ours"]), line("ours, a query with another avoid list", changed["ours"])
    for peer in PEERS:
        line(f"{peer}, build", build[peer])
        line(f"{peer}, a query", query[peer], ours[0])
        line(f"{peer}, build and a query, another avoid list", changed[peer], ours[1])
        print(f"  {peer}, lengths beside ours: {', '.join(f'{n} {word}' for word, n in differ[peer].most_common())}")


def to_rtamt(tree, task: Task) -> str:
    """A formula in rtamt's grammar over the signals x and y."""
    if isinstance(tree, In | Out):
        rect, r = task.regions[tree.region], task.robot.half_width
        a, b, c, d = rect.grown(-r if isinstance(tree, In) else r)
        if isinstance(tree, In):
            return f"((x>={a:.4f}) and (x<={c:.4f}) and (y>={b:.4f}) and (y<={d:.4f}))"
        return f"((x<={a:.4f}) or (x>={c:.4f}) or (y<={b:.4f}) or (y>={d:.4f}))"
    if isinstance(tree, And | Or):
        return "(" + (" and " if isinstance(tree, And) else " or ").join(to_rtamt(a, task) for a in tree.args) + ")"
    window = f"[{float(tree.a):g}:{float(tree.b):g}]"
    if isinstance(tree, Until):
        return f"({to_rtamt(tree.left, task)} until{window} {to_rtamt(tree.right, task)})"
    word = "eventually" if isinstance(tree, F) else "always"
    assert isinstance(tree, F | G)
    return f"({word}{window} {to_rtamt(tree.arg, task)})"


def bench_rtamt(tasks: list[Task]) -> None:
    print("\ncheck_path (formulas, collisions and speed) and rtamt's dense-time evaluation of the formulas alone")
    if not have("rtamt"):
        return
    import rtamt
    ours, theirs, formulas, differ = [], [], 0, 0
    for task in tasks:
        check(task, task.witness)
        verdict, ms = clock(check, task, task.witness)
        ours.append(ms)
        total = 0.0
        path = [*task.witness, [task.witness[-1][0] + 1000, *task.witness[-1][1:]]]
        signals = [[axis, [[p[0], p[i]] for j, p in enumerate(path) if not j or p[0] > path[j - 1][0]]]
                   for i, axis in ((1, "x"), (2, "y"))]
        for text, truth in zip(task.spec, verdict.clauses, strict=True):
            spec = rtamt.StlDenseTimeSpecification()
            spec.declare_var("x", "float")
            spec.declare_var("y", "float")
            spec.spec = to_rtamt(parse(text), task)
            spec.parse()
            robustness, ms = clock(spec.evaluate, *signals)
            total, formulas = total + ms, formulas + 1
            differ += (robustness[0][1] >= -1e-6) != truth
        theirs.append(total)
    base = line("check_path", ours)
    line("rtamt, parsing excluded", theirs, base)
    print(f"  {formulas} formulas, {differ} verdicts differ by more than 1e-6 m")


def bench_share(tasks: list[Task], episodes: int = 256, calls: int = 20) -> None:
    """Share of a training step that its tool calls take on L8, in one process and with nothing beside them. The step's
    length comes from what rl/plan.py assumes of sampling: no GPU is needed."""
    from rl.plan import LENGTHS, POST, SAMPLED, SPEED

    print(f"\ntools in a step of {episodes} L8 episodes with {calls} calls each")
    times = []
    for task in tasks:
        fresh, first = Task.from_json(task.to_json()), len(times)  # each episode prepares its map anew: the worst case
        for message in solve(task):
            for call in message.get("tool_calls", ()):
                given = json.loads(call["function"]["arguments"])
                times.append(clock(call_tool, fresh, call["function"]["name"], given)[1])
        times.append(clock(call_tool, fresh, "check_path", {"waypoints": task.witness})[1])
        times[first:] = [sum(times[first:]) / len(times[first:])]
    mean = line("a call, mean of the expert's and a check_path, by map", times)
    step = episodes * LENGTHS[False] * SAMPLED / SPEED / POST["sample"]
    took = episodes * calls * mean / 1e3
    print(f"  {took:.1f} s of {step:,.0f} s: {took / step:.1%} (aim: at most 2%); a step by {LENGTHS[False]:,} tokens "
          f"an episode, {SAMPLED:.0%} of them sampled at {SPEED:,} a second, which is {POST['sample']:.0%} of it")


def timed_task(job: tuple[str, int]) -> None:
    make_task(job[0], "bench", job[1])


def bench_making(n: int) -> None:
    mix = random.Random(0).choices(list(RL_COUNTS), list(RL_COUNTS.values()), k=n)
    cores = os.cpu_count() or 1
    with Pool(cores) as pool:
        pool.map(timed_task, [("L1", i) for i in range(2 * cores)])
        began = time.perf_counter()
        for _ in pool.imap_unordered(timed_task, [(level, i) for i, level in enumerate(mix)], chunksize=4):
            pass
        print(f"\nmaking tasks of the RL mix: {n / (time.perf_counter() - began):.0f} a second on {cores} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20, help="L8 maps (default 20)")
    parser.add_argument("--queries", type=int, default=4, help="queries a map against the peers (default 4)")
    parser.add_argument("--make", type=int, default=200, help="tasks to make for the rate (default 200)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    tasks = [make_task("L8", "bench", i) for i in range(args.tasks)]
    print(f"{len(tasks)} L8 tasks, {np.mean([len(t.obstacles) for t in tasks]):.0f} walls on average")
    bench_queries(tasks)
    bench_peers(tasks, args.queries)
    bench_rtamt(tasks)
    bench_rtamt([make_task(f"L{1 + i % 5}", "bench", i) for i in range(args.tasks)])
    bench_share(tasks)
    bench_making(args.make)


if __name__ == "__main__":
    main()
