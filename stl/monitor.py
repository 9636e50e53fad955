"""The exact verdict on a path, in continuous time, with reasons that a language model can act on.

Between two waypoints the robot's centre moves on a straight line at constant speed, so it is inside a rectangle for one
interval of the segment, found by clipping (Liang and Barsky, 1984); all segments are clipped against all rectangles at
once. From this follows when each atom holds, and from that when each formula does (intervals.py). No sampling.

Slack lies at the leaves alone and is always in the path's favour: rectangles are moved by 1e-6 m, each atom's intervals
are widened by 1e-6 s once, a segment may be 1e-6 m too long for its time. intervals.py says why doubles suffice then.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, pairwise

import numpy as np

from stl.formula import And, F, Formula, G, In, Or, Out, Until, brief, cut, walk
from stl.intervals import Intervals, always, eventually, gaps, holds, intersection, merged, union, until
from stl.world import MAX_WAYPOINTS, Rect, Task

SLACK = 1.001e-6  # metres and seconds; what is off by exactly 1e-6 passes, whichever way doubles round
MAX_TEXT = 1500  # characters of a verdict's text
MAX_EACH = 200  # violations of one kind that a verdict lists
MAX_SHOWN = 3  # violations of one geometric kind that its text describes
MAX_REASONS = 8  # failing formulas that are explained
MAX_WORK = 2_000_000  # waypoints x (obstacles + 4 x nodes of the formulas): keeps any check below a second


@dataclass(frozen=True)
class Violation:
    """One reason why a path is not a solution.

    kind: "format", "collision" (segment, obstacle), "speed" (segment), "workspace" (segment) or "clause" (index).
    Segment i joins waypoints i and i+1; index counts the task's formulas from 0.
    """

    kind: str
    text: str
    segment: int | None = None
    obstacle: str | None = None
    index: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What check found: one bool per formula in `clauses`, or None for a malformed path, where nothing is judged."""

    ok: bool
    clauses: list[bool] | None
    violations: list[Violation]
    text: str


@np.errstate(all="ignore")  # absurd but finite numbers overflow; they are too fast or outside anyway
def check(task: Task, waypoints: object) -> Verdict:
    """Judge `waypoints`, [[t, x, y], ...] in seconds and metres. Any value is accepted; errors are in the verdict."""
    leaves = task.cache.get("leaves") or task.cache.setdefault("leaves", Leaves(task))
    if problem := shape_problem(waypoints, leaves.limit) or _start_or_time_problem(task, waypoints):
        return malformed(problem)
    path, lo, hi, atoms = leaves.follow(waypoints)
    violations = [*_collisions(task, path, lo, hi), *_speeds(task, path), *_departures(task, path)]
    judge = Judge(task, atoms)
    clauses = [holds(judge.truth(formula), 0.0) for formula in task.formulas]
    for n, i in enumerate(i for i, true in enumerate(clauses) if not true):
        reason = judge.never(task.formulas[i], 0.0, 0.0) if n < MAX_REASONS else "does not hold"
        text = f"formula {i + 1}, {cut(task.spec[i], 120)}: {cut(reason, 320)}"
        violations.append(Violation("clause", text, index=i))
    return Verdict(not violations, clauses, violations, _report(path, clauses, violations))


def truth_if_stopped(task: Task, waypoints: object) -> list[Intervals] | None:
    """For each formula, the moments of [0, end] at which the robot could stop for good and the formula would hold.

    None for a malformed path. Stopping within an interval of an atom makes it endless and cuts the later ones off, so
    a verdict changes only where an interval of some atom begins or ends: nothing is sampled.
    """
    if (verdict := check(task, waypoints)).clauses is None:
        return None
    path, _, _, atoms = task.cache["leaves"].follow(waypoints)
    end, pieces = float(path[-1, 0]), [[] for _ in task.formulas]
    cuts = {0.0, end, *(t for spans in atoms.values() for span in spans for t in span if 0 < t < end)}
    for lo, hi in pairwise(sorted(cuts)):
        stop = (lo + hi) / 2
        judge = Judge(task, {atom: [(a, b if b < stop else math.inf) for a, b in spans if a <= stop]
                             for atom, spans in atoms.items()})
        for formula, true in zip(task.formulas, pieces, strict=True):
            true += [(lo, hi)] * holds(judge.truth(formula), 0.0)
    return [merged(true) or [(end, end)] * at_end for true, at_end in zip(pieces, verdict.clauses, strict=True)]


def malformed(problem: str) -> Verdict:
    """The verdict on an answer that is no path at all."""
    text = cut(f"Malformed path: {problem}", MAX_TEXT)
    return Verdict(False, None, [Violation("format", text)], text)


def shape_problem(waypoints: object, limit: int = MAX_WAYPOINTS) -> str | None:
    """What is wrong with a value that should be a list of waypoints, whatever the task, or None."""
    if not isinstance(waypoints, list | tuple) or not waypoints:
        return f"expected a list of waypoints [[t,x,y],...], found {brief(waypoints)}"
    if len(waypoints) > limit:
        return f"{len(waypoints)} waypoints; at most {limit} are allowed"
    for i, point in enumerate(waypoints):
        if not isinstance(point, list | tuple) or len(point) != 3:
            return f"waypoint {i}: expected [t,x,y], found {brief(point)}"
    if _finite(list(chain.from_iterable(waypoints))):
        return None
    i = next(i for i, point in enumerate(waypoints) if not _finite(point))
    return f"waypoint {i}: t, x and y must be finite numbers, found {brief(waypoints[i])}"


def _finite(values: Sequence) -> bool:
    """Whether all are finite numbers that fit a double; booleans are no numbers here."""
    try:
        return {int, float, np.float64}.issuperset(map(type, values)) and all(map(math.isfinite, values))
    except OverflowError:  # an integer beyond the doubles
        return False


def _start_or_time_problem(task: Task, waypoints: Sequence) -> str | None:
    (t, x, y), start = waypoints[0], task.robot.start
    if abs(t) > SLACK:
        return f"the first waypoint must be at t=0, found t={_short(t)}"
    if max(abs(x - start[0]), abs(y - start[1])) > SLACK:
        return f"the first waypoint must be the start, {_point((0, *start))}; found {_point(waypoints[0])}"
    for i, (before, after) in enumerate(pairwise(point[0] for point in waypoints)):
        if after < before:
            return f"waypoint {i + 1}: t={_short(after)} after t={_short(before)}; times must not decrease"
    return None


def clip(rects: np.ndarray, path: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each segment's line is inside each rectangle: from lo to hi, in lengths of the segment, if lo < hi.

    rects [4, K]: xmin, ymin, xmax, ymax (NaN: empty); path [S+1, 3] -> lo, hi [K, S].
    """
    lo, hi = -math.inf, math.inf
    for axis in (0, 1):
        low, high, start = rects[axis, :, None], rects[axis + 2, :, None], path[:-1, axis + 1]
        step = path[1:, axis + 1] - start
        one, two = (low - start) / step, (high - start) / step
        near, far = np.minimum(one, two), np.maximum(one, two)
        still = step == 0
        if still.any():  # between the two sides always or never
            near[:, still] = np.where((low < start[still]) & (start[still] < high), -math.inf, math.inf)
            far[:, still] = -near[:, still]
        lo, hi = np.maximum(lo, near), np.minimum(hi, far)
    return lo, hi


class Leaves:
    """Prepared once per task: every rectangle that the centre is compared with, grown by the body and the slack.

    rects [4, obstacles + outs + ins], NaN where it is empty; limit: the most waypoints that are judged.
    """

    def __init__(self, task: Task):
        nodes = [node for formula in task.formulas for node in walk(formula)]
        self.limit = min(MAX_WAYPOINTS, MAX_WORK // (len(task.obstacles) + 4 * len(nodes) + 1))
        self.outs, self.ins = (list(dict.fromkeys(n for n in nodes if isinstance(n, kind))) for kind in (Out, In))
        by = task.robot.half_width - SLACK
        rows = [rect.grown(by) for rect in (*task.obstacles.values(), *(task.regions[n.region] for n in self.outs))]
        self.out_rows, self.in_rows = np.s_[len(task.obstacles) : len(rows)], np.s_[len(rows) :]
        rows += [task.regions[n.region].grown(-by) for n in self.ins]
        self.rects = np.array(rows, dtype=float).reshape(-1, 4).T
        self.rects[:, (self.rects[0] >= self.rects[2]) | (self.rects[1] >= self.rects[3])] = math.nan

    @np.errstate(all="ignore")
    def follow(self, waypoints: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[Formula, Intervals]]:
        """The path as an array [S+1, 3], the stays of its segments in the rectangles (see clip), and when each atom
        holds. The robot rests at its last waypoint for ever: what reaches it is endless."""
        path = np.array(waypoints, dtype=float)
        if len(path) == 1:
            path = path.repeat(2, axis=0)  # a robot that never moves: one segment without length
        lo, hi = clip(self.rects, path)
        t = path[:, 0]
        enter, leave = (t[:-1] + np.clip(s, 0, 1) * np.diff(t) for s in (lo, hi))
        end = np.append(t[1:-1], math.inf)
        # in: of each segment the stay inside (closed)
        rows, a, b = self.in_rows, lo[self.in_rows], hi[self.in_rows]
        stay = (a <= b) & (a <= 1) & (b >= 0)
        ins = _widened(self.ins, stay, enter[rows], np.where(b >= 1, end, leave[rows]))
        # out: of each segment what lies before and after the stay inside (open), or all of it
        rows, a, b = self.out_rows, lo[self.out_rows], hi[self.out_rows]
        stay = (a < b) & (a < 1) & (b > 0)
        keep, begins, ends = (np.empty((len(a), 2 * len(end)), kind) for kind in (bool, float, float))
        keep[:, ::2], begins[:, ::2], ends[:, ::2] = ~stay | (a >= 0), t[:-1], np.where(stay, enter[rows], end)
        keep[:, 1::2], begins[:, 1::2], ends[:, 1::2] = stay & (b <= 1), leave[rows], end
        return path, lo, hi, ins | _widened(self.outs, keep, begins, ends)


def _widened(atoms: list, keep: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> dict[Formula, Intervals]:
    """The kept pieces [atoms, pieces] of each atom, ordered by time: widened by the slack, joined where they touch."""
    rows, lo, hi = np.nonzero(keep)[0], lo[keep] - SLACK, hi[keep] + SLACK
    fresh = np.ones(len(rows) + 1, dtype=bool)  # where an interval begins; a last one beyond the end
    fresh[1:-1] = (rows[1:] != rows[:-1]) | (lo[1:] > hi[:-1])
    first = np.flatnonzero(fresh)
    spans = list(zip(lo[first[:-1]].tolist(), hi[first[1:] - 1].tolist(), strict=True))
    cuts = np.searchsorted(rows[first[:-1]], np.arange(len(atoms) + 1)).tolist()
    return {atom: spans[a:b] for atom, (a, b) in zip(atoms, pairwise(cuts), strict=True)}


def _leg(path: np.ndarray, i: int) -> str:
    start, end = path[i : i + 2].tolist()  # plain floats print faster
    return f"segment {i}, {_point(start)} to {_point(end)},"


def _collisions(task: Task, path: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> Iterator[Violation]:
    m, names, t = len(task.obstacles), list(task.obstacles), path[:, 0]
    for i, k in np.argwhere(((lo[:m] < hi[:m]) & (lo[:m] < 1) & (hi[:m] > 0)).T)[:MAX_EACH].tolist():
        begin, end = (_short(t[i] + min(max(s[k, i], 0), 1) * (t[i + 1] - t[i])) for s in (lo, hi))
        area = _area(task.obstacles[names[k]].grown(task.robot.half_width), "()")
        text = f"collision: {_leg(path, i)} hits {names[k]} from t={begin} to {end}; the centre must keep out of {area}"
        yield Violation("collision", text, segment=i, obstacle=names[k])


def _speeds(task: Task, path: np.ndarray) -> Iterator[Violation]:
    (time, dx, dy), v_max = np.diff(path.T), task.robot.v_max
    length = np.hypot(dx, dy)
    for i in np.flatnonzero(~(length <= v_max * time + SLACK))[:MAX_EACH].tolist():
        rate = f"= {length[i] / time[i]:.6g} m/s" if time[i] > 0 else "(a jump)"
        text = f"speed: {_leg(path, i)} covers {length[i]:.6g} m in {time[i]:.6g} s {rate}; "
        text += f"the limit is {v_max:.6g} m/s, so it needs {np.ceil(length[i] / v_max * 100) / 100:.6g} s"
        yield Violation("speed", text, segment=i)


def _departures(task: Task, path: np.ndarray) -> Iterator[Violation]:
    inner, (_, x, y) = task.workspace.grown(-task.robot.half_width), path.T
    box = inner.grown(SLACK)
    outside = (x < box.xmin) | (x > box.xmax) | (y < box.ymin) | (y > box.ymax)
    for i in np.flatnonzero(outside[:-1] | outside[1:])[:MAX_EACH].tolist():
        text = f"workspace: {_leg(path, i)} leaves the workspace; the centre must stay in {_area(inner, '[]')}"
        yield Violation("workspace", text, segment=i)


class Judge:
    """When each subformula holds on one path, and why it does not where it should."""

    def __init__(self, task: Task, atoms: dict[Formula, Intervals]):
        self.task, self.atoms, self.known = task, atoms, {}

    def truth(self, node: Formula) -> Intervals:
        """The times at which a subformula holds."""
        if isinstance(node, In | Out):
            return self.atoms[node]
        if id(node) not in self.known:
            match node:
                case And(args):
                    times = reduce(intersection, map(self.truth, args))
                case Or(args):
                    times = union(*map(self.truth, args))
                case F(a, b, arg):
                    times = eventually(self.truth(arg), a, b)
                case G(a, b, arg):
                    times = always(self.truth(arg), a, b)
                case Until(a, b, left, right):
                    times = until(self.truth(left), self.truth(right), a, b)
            self.known[id(node)] = times
        return self.known[id(node)]

    def within(self, node: Formula, lo: float, hi: float) -> Intervals:
        return intersection(self.truth(node), [(lo, hi)])

    def never(self, node: Formula, lo: float, hi: float) -> str:
        """Why `node` holds at no time of [lo, hi]."""
        match node:
            case Or(args):
                return "; ".join(self.never(arg, lo, hi) for arg in args)
            case F(a, b, arg):
                return self.never(arg, lo + a, hi + b)
            case G(a, b, arg) if lo == hi:
                return self.broken(arg, lo + a, lo + b)
            case And(args):
                parts = [(arg, lo, hi) for arg in args]
            case G(a, b, arg) | Until(a, b, _, arg):
                parts = [(arg, lo + a, hi + b)]
            case _:
                parts = []
        if absent := [part for part in parts if not self.within(*part)]:  # what never holds where it must says it all
            return "; ".join(self.never(*part) for part in absent)
        if isinstance(node, Until) and lo == hi:  # the right side holds in time, but the left one not until then
            (right, a, b), first = parts[0], self.within(*parts[0])[0][0]
            when = f"t={_short(first)}" + (f", first within {_span(a, b)}," if a < b else "")
            return f"{_name(right)} holds at {when} but {self.broken(node.left, lo, first)}"
        if isinstance(node, Until):
            parts.append((node.left, lo, hi))
        text = f"{_name(node)} {'never holds within' if lo < hi else 'does not hold at'} {_span(lo, hi)}"
        if not parts:
            return f"{text}; it {self.when(node, lo, hi)}"
        return "; ".join([text, *(f"{_name(part[0])} {self.when(*part)}" for part in parts)])

    def broken(self, node: Formula, lo: float, hi: float) -> str:
        """Why `node` does not hold at all times of [lo, hi]."""
        if not self.within(node, lo, hi):
            return self.never(node, lo, hi)
        if isinstance(node, And):
            return "; ".join(self.broken(arg, lo, hi) for arg in node.args if gaps(self.truth(arg), lo, hi))
        if isinstance(node, G):
            return self.broken(node.arg, lo + node.a, hi + node.b)
        missing = gaps(self.truth(node), lo, hi)
        spans = ", ".join(_span(*gap, "()") for gap in missing[:3]) + (" and later" if len(missing) > 3 else "")
        text = f"{_name(node)} must hold throughout {_span(lo, hi)} but fails during {spans}"
        if isinstance(node, In | Out):
            return text
        t = sum(missing[0]) / 2 if missing else lo  # rounding may close a gap
        return f"{text}; at t={_short(t)}: {self.never(node, t, t)}"

    def when(self, node: Formula, lo: float, hi: float) -> str:
        """When `node` holds, near [lo, hi] first."""
        times = [(max(a + SLACK, 0.0), b - SLACK) for a, b in self.truth(node) if b >= SLACK]
        if times:
            near = sorted(times, key=lambda span: max(span[0] - hi, lo - span[1]))[:3]
            more = f" and {len(times) - 3} times more" if len(times) > 3 else ""
            return f"holds at {', '.join(_inward(*span) for span in sorted(near))}{more}"
        if not isinstance(node, In):
            return "never holds on this path"
        inner = self.task.regions[node.region].grown(-self.task.robot.half_width)
        return f"never holds on this path (the centre must be in {_area(inner, '[]')})"


def _report(path: np.ndarray, clauses: list[bool], violations: list[Violation]) -> str:
    """What check_path answers: a line of counts, then the first problems of each kind, then what holds."""
    if not violations:
        end = f"The path ends at t={_short(path[-1, 0])} in ({_short(path[-1, 1])}, {_short(path[-1, 2])})."
        return f"Correct: no collision, inside the workspace, within the speed limit, every formula holds. {end}"
    counts = Counter(v.kind for v in violations)
    lines = ["Not a solution: " + ", ".join(f"{n} x {kind}" for kind, n in counts.items())]
    for kind, n in counts.items():
        shown = MAX_REASONS if kind == "clause" else MAX_SHOWN
        lines += [v.text for v in violations if v.kind == kind][:shown]
        lines += [f"... and {n - shown} x {kind} more"] if n > shown else []
    held = ", ".join(str(i + 1) for i, true in enumerate(clauses) if true)
    lines += [f"formulas that hold: {held}"] if held else []
    return cut("\n".join(lines), MAX_TEXT)


def _short(value: float) -> str:
    """A number as people write it, with at most 3 decimals."""
    text = f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1e9 else f"{value:.3g}"
    return "0" if text == "-0" else text


def _point(waypoint: Sequence[float]) -> str:
    return f"[{','.join(map(_short, waypoint))}]"


def _area(rect: Rect, brackets: str) -> str:
    left, right = brackets
    x, y = ((_short(lo), _short(hi)) for lo, hi in ((rect.xmin, rect.xmax), (rect.ymin, rect.ymax)))
    return f"x {left}{x[0]},{x[1]}{right}, y {left}{y[0]},{y[1]}{right}"


def _span(lo: float, hi: float, brackets: str = "[]") -> str:
    left, right = brackets
    return f"{left}{_short(lo)},{_short(hi)}{right}" if lo < hi else f"t={_short(lo)}"


def _inward(lo: float, hi: float) -> str:
    """A stretch of truth rounded to 0.01 s so that both printed ends lie in it, unless it is shorter than that."""
    low = math.ceil(lo * 100 - 1e-4) / 100
    high = math.floor(hi * 100 + 1e-4) / 100 if hi < math.inf else math.inf
    if low > high:
        low, high = round(lo, 6), round(hi, 6)
    return f"[{_short(low)},{_short(high)}]" if high < math.inf else f"[{_short(low)},end]"


def _name(node: Formula) -> str:
    return cut(str(node), 80)
