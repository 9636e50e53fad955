"""The monitor against checked cases, an exact point-by-point evaluator, rtamt, and hostile answers.

The evaluator shares no idea with the monitor: it knows no intervals. In rational arithmetic it asks whether a formula
holds at a time, looking only at the finitely many times at which anything below can change and at one time between each
two of them. `slack` moves rectangles and dilates atoms in the path's favour, so that the monitor must lie between slack
0 (what exact arithmetic accepts is accepted) and slack 2.1e-6 (what is clearly wrong is rejected).
"""

import copy
import json
import math
import random
import time
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stl import intervals
from stl.formula import And, F, G, In, Or, Out, Until, children
from stl.levels import make_task
from stl.monitor import MAX_TEXT, check, truth_if_stopped
from stl.prompts import grade
from stl.tools import call_tool
from stl.world import Task

CASES = Path(__file__).parents[1] / "cases"
STL = [json.loads(line) for line in (CASES / "stl.jsonl").read_text().splitlines()]
TOLERANT = Fraction("0.0000021")


@pytest.mark.parametrize("case", STL, ids=[case["id"] for case in STL])
def test_checked_case(case):
    task = Task.from_json(case["task"])
    verdict = check(task, case["path"])
    assert verdict.clauses == case["clauses"]
    assert grade(task, f"So <answer>[]</answer>, or <answer>{json.dumps(case['path'])}</answer>") == verdict
    assert call_tool(task, "check_path", {"waypoints": case["path"]}) == verdict.text
    found = {(v.kind, v.segment, v.obstacle, v.index) for v in verdict.violations}
    assert found == {(v["kind"], v.get("segment"), v.get("obstacle"), v.get("index")) for v in case["violations"]}
    assert verdict.ok == (not case["violations"])


@pytest.mark.parametrize("name", ["doorpuzzle-1", "rover-1", "stlcg-1"])
def test_paths_of_published_benchmarks_are_solutions(name):
    path = json.loads((CASES / "paper" / f"{name}.path.json").read_text())
    assert check(Task.from_file(CASES / "paper" / f"{name}.json"), path).ok


class Oracle:
    """Truth of formulas at single times, in rational arithmetic."""

    def __init__(self, task, path, slack=0):
        self.task, self.slack, self.r = task, slack, exact(task.robot.half_width)
        self.path = [tuple(map(exact, point)) for point in path]
        self.truth, self.changes = cache(self._truth), cache(self._changes)

    def position(self, t):
        for (t0, *p), (t1, *q) in pairwise(self.path):
            if t0 <= t <= t1 and t0 < t1:
                return [a + (b - a) * (t - t0) / (t1 - t0) for a, b in zip(p, q, strict=True)]
        return self.path[-1][1:]

    def sides(self, rect, by):
        xmin, ymin, xmax, ymax = map(exact, rect)
        return (xmin - by, xmax + by), (ymin - by, ymax + by)

    def atom_sides(self, node):
        by = self.r - self.slack
        return self.sides(self.task.regions[node.region], -by if isinstance(node, In) else by)

    def _changes(self, node):
        """All times at which the truth of `node` may change (and some more)."""
        if isinstance(node, In | Out):
            times = {point[0] for point in self.path}
            for (t0, *p), (t1, *q) in pairwise(self.path):
                for a, b, (low, high) in zip(p, q, self.atom_sides(node), strict=True):
                    if a != b:
                        times |= {t0 + (t1 - t0) * (side - a) / (b - a) for side in (low, high)}
            return sorted({t + d for t in times for d in {-self.slack, 0, self.slack}})
        if isinstance(node, And | Or):
            return sorted({t for arg in node.args for t in self.changes(arg)})
        a, b = exact(node.a), exact(node.b)
        return sorted({t - d for arg in children(node) for t in self.changes(arg) for d in (0, a, b)})

    def probes(self, node, lo, hi):
        """Times of [lo, hi] that decide anything about `node` there."""
        marks = [lo, *(t for t in self.changes(node) if lo < t < hi), *([hi] if hi > lo else [])]
        return sorted({*marks, *((a + b) / 2 for a, b in pairwise(marks))})

    def at(self, node, t):
        x, y = self.position(t)
        (x0, x1), (y0, y1) = self.atom_sides(node)
        if isinstance(node, In):
            return x0 <= x <= x1 and y0 <= y <= y1
        return not (x0 < x < x1 and y0 < y < y1)

    def _truth(self, node, t):
        if isinstance(node, In | Out):
            return any(self.at(node, s) for s in self.probes(node, t - self.slack, t + self.slack))
        if isinstance(node, And):
            return all(self.truth(arg, t) for arg in node.args)
        if isinstance(node, Or):
            return any(self.truth(arg, t) for arg in node.args)
        lo, hi = t + exact(node.a), t + exact(node.b)
        if isinstance(node, F):
            return any(self.truth(node.arg, s) for s in self.probes(node.arg, lo, hi))
        if isinstance(node, G):
            return all(self.truth(node.arg, s) for s in self.probes(node.arg, lo, hi))
        both = And((node.left, node.right))
        for s in sorted({*self.probes(both, t, hi), lo}):
            if not self.truth(node.left, s):
                return False
            if s >= lo and self.truth(node.right, s):
                return True
        return False

    def collides(self, i, rect):
        (x0, x1), (y0, y1) = self.sides(rect, self.r - self.slack)
        (_, *p), (_, *q) = self.path[i], self.path[i + 1]
        cuts = {Fraction(0), Fraction(1)}
        for a, b, sides in zip(p, q, ((x0, x1), (y0, y1)), strict=True):
            cuts |= {(side - a) / (b - a) for side in sides if a != b and 0 < (side - a) / (b - a) < 1}
        for s in [(a + b) / 2 for a, b in pairwise(sorted(cuts))]:
            x, y = (a + (b - a) * s for a, b in zip(p, q, strict=True))
            if x0 < x < x1 and y0 < y < y1:
                return True
        return False


@cache
def exact(value):
    """The decimal that is written, as a fraction."""
    return value if isinstance(value, Fraction) else Fraction(repr(value))


def draw_number(rng, low, high, digits=2):
    return round(rng.uniform(low, high), digits)


def draw_case(rng):
    """A random task and a path, on a grid of 0.01, with regions and windows that the path often just touches."""
    r, points, t = rng.choice([0.1, 0.25, 0.3, 0.37]), [], 0.0
    for _ in range(rng.randint(1, 6)):
        waits = points and rng.random() < 0.2
        if points:
            t = round(t + (0.0 if waits and rng.random() < 0.3 else draw_number(rng, 0.5, 6)), 2)
        x, y = points[-1][1:] if waits else (draw_number(rng, r, 8 - r), draw_number(rng, r, 8 - r))
        points.append([t, x, y])

    def rect():
        x, y, w, h = draw_number(rng, 0, 6), draw_number(rng, 0, 6), draw_number(rng, 0.2, 3), draw_number(rng, 0.2, 3)
        if rng.random() < 0.5:  # a side just beside a waypoint
            _, px, py = rng.choice(points)
            off = rng.choice([-r, r])
            x, y = rng.choice([(px + off, y), (px + off - w, y), (x, py + off), (x, py + off - h)])
            x, y = round(x, 2), round(y, 2)
        return [x, y, round(x + w, 2), round(y + h, 2)]

    def window():
        marks = [0.0, draw_number(rng, 0, 12), draw_number(rng, 0, 12)]
        marks += [round(abs(a[0] - b[0]) + rng.choice([0, 0, -0.01, 0.01]), 2) for a, b in [rng.choices(points, k=2)]]
        a, b = sorted(max(0.0, m) for m in rng.choices(marks, k=2))
        return f"[{a},{b}]"

    def formula(depth):
        kind = rng.choice("aoFGU&|" if depth else "ao")
        if kind in "ao":
            return ("in" if kind == "a" else "out") + f"({rng.choice('AB')})"
        if kind in "FG":
            return f"{kind}{window()} ({formula(depth - 1)})"
        return f"({formula(depth - 1)}) {kind + window() if kind == 'U' else kind} ({formula(depth - 1)})"

    task = {
        "id": "drawn",
        "workspace": [0, 0, 8, 8],
        "robot": {"half_width": r, "v_max": rng.choice([0.5, 1, 2.5]), "start": points[0][1:]},
        "obstacles": {f"W{i}": rect() for i in range(3)},
        "regions": {"A": rect(), "B": rect()},
        "spec": [formula(rng.randint(0, 3)) for _ in range(3)],
    }
    return Task.from_json(task), points


def compare_with_oracle(seeds):
    """Returns how often the monitor accepted a formula, and how often only thanks to its slack."""
    tally = Counter()
    for seed in seeds:
        task, path = draw_case(random.Random(seed))
        verdict, strict, tolerant = check(task, path), Oracle(task, path), Oracle(task, path, TOLERANT)
        for formula, holds in zip(task.formulas, verdict.clauses, strict=True):
            truth = strict.truth(formula, Fraction(0))
            assert holds or not truth, f"seed {seed}: {formula} holds but was rejected"
            if holds and not truth:
                assert tolerant.truth(formula, Fraction(0)), f"seed {seed}: {formula} is clearly false but was accepted"
            tally["accepted"] += holds
            tally["only by slack"] += holds and not truth
            tally["formulas"] += 1
        hits = {(v.segment, v.obstacle) for v in verdict.violations if v.kind == "collision"}
        for i in range(len(path) - 1):
            for name, rect in task.obstacles.items():
                assert (i, name) not in hits or strict.collides(i, rect), f"seed {seed}: {name} is not hit"
                assert (i, name) in hits or not tolerant.collides(i, rect), f"seed {seed}: {name} is hit"
        fast = {v.segment for v in verdict.violations if v.kind == "speed"}
        for i, ((t0, x0, y0), (t1, x1, y1)) in enumerate(pairwise(strict.path)):
            square, reach = (x1 - x0) ** 2 + (y1 - y0) ** 2, exact(task.robot.v_max) * (t1 - t0)
            assert i not in fast or square > reach**2, f"seed {seed}: segment {i} is not too fast"
            assert i in fast or square <= (reach + TOLERANT) ** 2, f"seed {seed}: segment {i} is too fast"
    return tally


def test_against_exact_evaluator():
    tally = compare_with_oracle(range(250))
    assert 0.2 < tally["accepted"] / tally["formulas"] < 0.8  # the draw is worth something
    assert tally["only by slack"] < 0.01 * tally["formulas"]


@pytest.mark.slow
def test_against_exact_evaluator_long():
    print(compare_with_oracle(range(1000, 6000)))


@pytest.mark.parametrize("seed", range(40))
def test_identities(seed):
    """Formulas that mean the same have the same verdict."""
    task, path = draw_case(random.Random(seed))
    p, q = (f"({formula})" for formula in task.spec[:2])
    pairs = [
        (f"F[1,4] F[2,3.5] {p}", f"F[3,7.5] {p}"),
        (f"G[1,4] G[2,3.5] {p}", f"G[3,7.5] {p}"),
        (f"F[1,7] ({p} | {q})", f"F[1,7] {p} | F[1,7] {q}"),
        (f"G[1,7] ({p} & {q})", f"G[1,7] {p} & G[1,7] {q}"),
        (f"{p} U[0,5] {q}", f"{p} & {p} U[0,5] {q}"),
        (f"{p} U[2,5] {q}", f"G[0,2] {p} & F[2,2] ({p} U[0,3] {q})"),
        (f"{p} U[3,3] {q}", f"G[0,3] {p} & F[3,3] {q}"),
        (f"F[0,0] {p}", f"G[0,0] {p}"),
    ]
    data = task.to_json() | {"spec": [text for pair in pairs for text in pair]}
    clauses = check(Task.from_json(data), path).clauses
    assert clauses[::2] == clauses[1::2]


def square_task(spec, v_max=1, **regions):
    data = {"workspace": [0, 0, 12, 12], "robot": {"half_width": 0.5, "v_max": v_max, "start": [1, 6]}}
    return Task.from_json(data | {"id": "square", "obstacles": {}, "regions": regions, "spec": spec})


def test_decimals_do_not_flip_verdicts():
    """Window ends that meet crossing times exactly, in sums that doubles round either way."""
    path = [[0, 1, 6], [9, 10, 6]]  # x = 1 + t
    for tenths in range(10, 60):
        t = tenths / 10  # in(A) holds on [t, t + 1]
        region = [round(0.5 + t, 1), 5, round(2.5 + t, 1), 7]
        late, later = round(t - 0.1, 1), round(t + 0.9, 1)
        spec = [f"G[{t},{round(t + 1, 1)}] in(A)", f"F[0,{t}] in(A)", f"F[{late},{late}] F[0.1,0.1] G[0,1] in(A)"]
        spec += [f"F[0.1,0.1] F[{later},20] in(A)", f"F[0.1,0.1] F[0.1,0.1] F[0.1,0.1] F[0,{round(t - 0.3, 1)}] in(A)"]
        spec += [f"out(A) U[0,{t}] out(A)", f"F[{t},{t}] (in(A) U[1,1] in(A))"]
        spec += [f"F[0,{late}] in(A)", f"G[{t},{round(t + 1.01, 2)}] in(A)", f"F[0.1,0.1] F[{later}1,20] in(A)"]
        assert check(square_task(spec, A=region), path).clauses == [True] * 7 + [False] * 3


def test_slack_is_about_a_millionth():
    for off, ok in ((0, True), (1e-6, True), (3e-6, False)):
        path = [[0, 1, 6], [9, 10 + off, 6]]
        assert check(square_task([]), path).ok == ok
        assert check(square_task(["F[0,20] in(A)"], 2, A=[9.5 + off, 5, 12, 7]), [[0, 1, 6], [9, 10, 6]]).ok == ok
        assert check(square_task(["F[0,9] in(A)"], 2, A=[9.5, 5, 12, 7]), [[0, 1, 6], [9 + off, 10, 6]]).ok == ok
        assert check(square_task([]), [[0, 1, 6], [20, 11.5 + off, 6]]).ok == ok


def test_format_is_reported_alone():
    task = square_task(["in(A)"], A=[9, 5, 12, 7])
    for path in ([], None, "[[0,1,6]]", {}, 3, [[0, 1]], [[0, 1, "6"]], [[0, 1, math.nan]], [[0, 1, True]], [None],
                 [[1, 1, 6]], [[0, 1, 6.1]], [[0, 1, 6], [2, 1, 6], [1, 1, 6]], [[0, 1, 6]] * 20_000, [[0, 1, 10**400]],
                 [[0, 1, 6], [1e400, 1, 6]], [[0, 1, [6]]], [[10**5000, 1, 6]], ((0, 1, 6), "abc")):  # fmt: skip
        verdict = check(task, path)
        assert not verdict.ok and verdict.clauses is None and [v.kind for v in verdict.violations] == ["format"]
        assert "\n" not in verdict.text and len(verdict.text) < 300
    assert "waypoint 2: t=1 after t=2" in check(task, [[0, 1, 6], [2, 1, 6], [1, 1, 6]]).text
    assert check(task, ((0, 1, 6), (1, 1, 6))).clauses == [False]
    assert check(task, [[np.float64(0), 1, 6]]).clauses == [False]


def test_reasons_say_what_fails_and_when_it_holds():
    regions = {"A": [4, 5, 6, 7], "B": [8, 5, 12, 7], "D": [5.5, 4, 7, 8]}
    path = [[0, 1, 6], [9, 10, 6]]  # in(A) on [3.5, 4.5], in(B) from 7.5 on, out(D) outside (4, 6.5)
    expected = {
        "F[0,3] in(A)": "in(A) never holds within [0,3]; it holds at [3.5,4.5]",
        "in(B)": "in(B) does not hold at t=0; it holds at [7.5,end]",
        "G[0,10] out(D)": "out(D) must hold throughout [0,10] but fails during (4,6.5)",
        "G[8,10] in(A)": "in(A) never holds within [8,10]; it holds at [3.5,4.5]",
        "F[0,2] in(A) | F[0,3] in(B)": "in(A) never holds within [0,2]; it holds at [3.5,4.5]; in(B) never",
        "F[0,9] (in(A) & in(B))": "never holds within [0,9]; in(A) holds at [3.5,4.5]; in(B) holds at [7.5,end]",
        "out(D) U[0,20] in(B)": "in(B) holds at t=7.5, first within [0,20], but out(D) must hold throughout [0,7.5]",
        "out(D) U[0,2] in(A)": "in(A) never holds within [0,2]",
        "F[0,9] G[0,2] in(A)": "G[0,2] in(A) never holds within [0,9]; in(A) holds at [3.5,4.5]",
        "G[0,6] F[0,2] in(A)": "fails during (0,1.5), (4.5,6); at t=0.75: in(A) never holds within [0.75,2.75]",
        "F[0,2] (out(D) U[4,5] in(B))": "in(B) never holds within [4,7]; it holds at [7.5,end]",
        "F[0,9] (in(A) & F[4,5] in(A))": "F[4,5] in(A) holds at [0,0.5]",
    }
    task = square_task(list(expected), **regions)
    verdict = check(task, path)
    texts = {v.index: v.text for v in verdict.violations}
    for i, (formula, words) in enumerate(expected.items()):
        if i < 8:
            assert texts[i].startswith(f"formula {i + 1}, {formula}: ") and words in texts[i], texts[i]
        single = check(square_task([formula], **regions), path).text
        assert words in single, single
    assert len(verdict.text) <= MAX_TEXT
    crash = Task.from_json(task.to_json() | {"spec": [], "obstacles": {"W1": [4, 5, 5, 8]}})
    text = check(crash, [[0, 1, 6], [4, 10, 6], [9, 10, 12]]).text
    assert "segment 0, [0,1,6] to [4,10,6], hits W1 from t=1.111 to 2;" in text
    assert "covers 9 m in 4 s = 2.25 m/s; the limit is 1 m/s, so it needs 9 s" in text
    assert "workspace: segment 1, [4,10,6] to [9,10,12], leaves the workspace" in text
    many = check(crash, [[0, 1, 6]] + [[i, 4.5, 6] for i in range(500)])
    assert "more" in many.text and len(many.text) <= MAX_TEXT and len(many.violations) < 500


def test_doors_of_time():
    """A path of one waypoint, the rest after the last one, instants, and jumps."""
    task = square_task(["G[0,1000] in(S)", "F[500,500] in(S)", "in(S)"], S=[0.5, 5.5, 1.5, 6.5])
    assert check(task, [[0, 1, 6]]).ok and check(task, [[0, 1, 6], [0, 1, 6]]).ok
    blocked = Task.from_json(task.to_json() | {"obstacles": {"W": [1, 5, 2, 7]}})
    assert [v.kind for v in check(blocked, [[0, 1, 6]]).violations] == ["collision"]
    jump = check(task, [[0, 1, 6], [0, 3, 6], [3, 1, 6]])
    assert [v.kind for v in jump.violations] == ["speed", "clause"] and jump.clauses == [False, True, True]


JUNK = [None, True, -1, 10**400, 10**5000, 1e308, -1e308, math.nan, math.inf, "", "1", [], [[]], {}, 5e-324, 1e17]


def test_a_thousand_broken_answers():
    rng = random.Random(0)
    task = Task.from_json(STL[40]["task"])
    for _ in range(1000):
        path = copy.deepcopy(rng.choice(STL)["path"])
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(path))
            kind = rng.random()
            if kind < 0.3:
                path[i] = rng.choice(JUNK)
            elif kind < 0.8 and isinstance(path[i], list) and path[i]:
                path[i][rng.randrange(len(path[i]))] = rng.choice(JUNK)
            elif kind < 0.9:
                path[i:i] = path[i : i + 1] * rng.choice([2, 30_000])
            else:
                path = rng.choice(JUNK) or path
                break
        start = time.process_time()
        verdict = check(task, path)
        assert time.process_time() - start < 1  # a bound on work, not a measure of speed
        assert len(verdict.text) <= MAX_TEXT and isinstance(verdict.ok, bool)
        absurd = [rng.choice([0, 1, 1e308, 5e-324]), *rng.choices([1e308, -1e308, 1e-308, 3], k=2)]
        assert check(task, [[0, *task.robot.start], absurd]).clauses is not None


def test_the_largest_answers_and_specs_stay_below_a_second():
    regions = {f"R{i}": [1 + i / 100, 5, 2 + i / 100, 7] for i in range(60)}
    zigzag = [[i, 1 if i % 2 == 0 else 3, 6] for i in range(10_000)]
    deep = "(" + ") U[0,9] (".join([f"F[0,2] in(R{i}) | out(R{i})" for i in range(20)]) + ")"
    wide = " & ".join(f"G[0,900] F[0,9] in(R{i})" for i in range(60))
    walls = {f"W{i}": [2, 4, 3, 8 + i / 1000] for i in range(1000)}
    for spec, obstacles in (([deep, wide] * 4, {}), ([], walls), ([wide], walls), (["in(R1)"], {})):
        data = square_task(spec, **regions).to_json() | {"obstacles": obstacles}
        task = Task.from_json(data)
        for n in (10_000, 3_000, 1_000, 300):
            start = time.process_time()
            verdict = check(task, zigzag[:n])
            assert time.process_time() - start < 1  # a bound on work, not a measure of speed
            assert len(verdict.text) <= MAX_TEXT


def rtamt_holds(rtamt, text, oracle, regions):
    """rtamt's dense-time verdict; each atom is a signal of steps between the oracle's times of change."""
    spec, signals = rtamt.StlDenseTimeSpecification(), []
    for kind in (In, Out):
        for name in regions:
            node = kind(name)
            times = [t for t in oracle.changes(node) if t >= 0]
            cells = pairwise([*times, times[-1] + 2])
            steps = [[float(t), 1.0 if oracle.at(node, (t + u) / 2) else -1.0] for t, u in cells]
            signals.append([f"{kind.__name__.lower()}_{name}", [*steps, [1000.0, steps[-1][1]]]])
            spec.declare_var(signals[-1][0], "float")
    spec.spec = text
    spec.parse()
    return spec.evaluate(*signals)[0][1] > 0


def in_rtamt(node):
    if isinstance(node, In | Out):
        return f"({type(node).__name__.lower()}_{node.region} >= 0)"
    if isinstance(node, And | Or):
        return "(" + (" and " if isinstance(node, And) else " or ").join(map(in_rtamt, node.args)) + ")"
    if isinstance(node, Until):
        return f"({in_rtamt(node.left)} until[{node.a},{node.b}] {in_rtamt(node.right)})"
    return f"({'eventually' if isinstance(node, F) else 'always'}[{node.a},{node.b}] {in_rtamt(node.arg)})"


def compare_with_rtamt(seeds):
    rtamt = pytest.importorskip("rtamt")
    tally = Counter()
    for seed in seeds:
        task, path = draw_case(random.Random(seed))
        oracle = Oracle(task, path)
        for formula, holds in zip(task.formulas, check(task, path).clauses, strict=True):
            theirs = rtamt_holds(rtamt, in_rtamt(formula), oracle, task.regions)
            tally["formulas"] += 1
            if theirs != holds:
                tally["differ"] += 1
                tally["elsewhere"] += not at_boundary(task, path, formula)
    return tally


def at_boundary(task, path, formula):
    """Whether a millisecond changes the exact verdict, so that it hangs on open or closed ends (rtamt's are open)."""
    oracle, step = Oracle(task, path), Fraction(1, 1000)
    verdicts = {oracle.truth(formula, t) for t in (Fraction(0), step)}
    verdicts |= {oracle.truth(_moved(formula, by, mode), Fraction(0)) for by in (-step, step) for mode in range(4)}
    return len(verdicts) == 2


def _moved(node, by, mode):
    """The formula with all window ends moved by `by` (mode 0: both, 1: the first, 2: the second, 3: apart)."""
    if isinstance(node, In | Out):
        return node
    if isinstance(node, And | Or):
        return type(node)(tuple(_moved(arg, by, mode) for arg in node.args))
    a, b = exact(node.a) + by * (mode in (0, 1)) - by * (mode == 3), exact(node.b) + by * (mode != 1)
    parts = [_moved(child, by, mode) for child in children(node)]
    return type(node)(max(a, Fraction(0)), max(a, b, Fraction(0)), *parts)


def test_against_rtamt():
    tally = compare_with_rtamt(range(80))
    assert tally["formulas"] == 240 and tally["elsewhere"] == 0
    assert tally["differ"] < 0.1 * tally["formulas"]




@pytest.mark.parametrize("level", ["L0", "L3", "L5", "L8"])
def test_truth_if_stopped_is_what_check_says_of_the_path_up_to_there(level):
    """Between the turns that it names, and on both sides of each, against the verdict on the path cut there."""
    for index in range(2):
        task = make_task(level, "eval", index)
        found, way = truth_if_stopped(task, task.witness), np.array(task.witness)
        turns = {t + by for spans in found for span in spans for t in span for by in (-1e-3, 1e-3)}
        for stop in sorted(t for t in turns | set(np.linspace(0, way[-1, 0], 20)) if 0 <= t <= way[-1, 0]):
            here = [float(np.interp(stop, way[:, 0], way[:, axis])) for axis in (1, 2)]
            judged = check(task, [*(row for row in task.witness if row[0] < stop), [float(stop), *here]]).clauses
            assert judged == [intervals.holds(spans, stop) for spans in found], stop


def test_truth_if_stopped_on_a_path_by_hand():
    """1 m/s along x; A is 2..4 and B 6..8, the body 1 wide: in(A) from 2.5 to 3.5, out(B) until 5.5 and from 8.5."""
    data = {"id": "hand", "workspace": [0, -5, 20, 5], "robot": {"half_width": 0.5, "v_max": 1, "start": [1, 0]},
            "obstacles": {}, "regions": {"A": [2, -1, 4, 1], "B": [6, -1, 8, 1]},
            "spec": ["F[0,9] in(A)", "F[3,9] in(A)", "out(B) U[0,9] in(A)", "G[0,20] out(B)", "F[0,1] in(B)"]}
    found = truth_if_stopped(Task.from_json(data), [[0, 1, 0], [10, 11, 0]])
    expected = [[(1.5, 10)], [(1.5, 2.5)], [(1.5, 10)], [(0, 4.5)], []]
    assert [[pytest.approx(span, abs=1e-5) for span in spans] for spans in expected] == found
    assert truth_if_stopped(Task.from_json(data), [[0, 1, 0]]) == [[], [], [], [(0, 0)], []]
    assert truth_if_stopped(Task.from_json(data), "nothing") is None
