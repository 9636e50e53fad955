"""Finite unions of closed intervals of time, and the temporal operators as operations on them; see O. Maler and
D. Nickovic, "Monitoring temporal properties of continuous signals" (2004).

A union is a list of (lo, hi), lo <= hi, in increasing order and disjoint: touching intervals are one. lo == hi is a
single instant; hi may be inf. Each operation is linear in the intervals.

Why plain doubles are exact enough here: the monitor widens the truth intervals of each atom by 1e-6 s, and every
operation keeps that margin. If its arguments contain the widened exact sets, its result contains the widened exact
result, because none contains a negation. (For `always`, widening and shrinking both move an endpoint; for `until`, t'
moves with t.) Rounding takes about 1e-16 of the times for each operation, so that for times up to 1e8 s what exact
arithmetic accepts is accepted, whichever way 7.1 - 0.3 is rounded, and no two endpoints are compared for equality.
"""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(*sets: Intervals) -> Intervals:
    """The times that lie in any of the sets."""
    return merged(sorted(interval for one in sets for interval in one))


def merged(ordered: Iterable[tuple[float, float]]) -> Intervals:
    """Intervals ordered by lo, joined where they touch or overlap."""
    out: Intervals = []
    for lo, hi in ordered:
        if out and lo <= out[-1][1]:
            if hi > out[-1][1]:
                out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out


def intersection(p: Intervals, q: Intervals) -> Intervals:
    """The times that lie in both sets."""
    out, i, j = [], 0, 0
    while i < len(p) and j < len(q):
        lo, hi = max(p[i][0], q[j][0]), min(p[i][1], q[j][1])
        if lo <= hi:
            out.append((lo, hi))
        if p[i][1] < q[j][1]:
            i += 1
        else:
            j += 1
    return out


def eventually(p: Intervals, a: float, b: float) -> Intervals:
    """F[a,b]: the times t with some t' of [t+a, t+b] in p."""
    return merged((lo - b, hi - a) for lo, hi in p)


def always(p: Intervals, a: float, b: float) -> Intervals:
    """G[a,b]: the times t with all of [t+a, t+b] in p, that is, in one interval of p."""
    return [(lo - a, hi - b) for lo, hi in p if lo - a <= hi - b]


def until(p: Intervals, q: Intervals, a: float, b: float) -> Intervals:
    """p U[a,b] q: the times t with some t' of [t+a, t+b] in q such that p holds on all of [t, t'].

    As a >= 0, t and t' lie in the same interval [c, d] of p. So each interval [e, f] of q within [c, d] serves the t of
    [c, d] with t + a <= f and t + b >= e.
    """
    out, j = [], 0
    for c, d in p:
        while j < len(q) and q[j][1] < c:
            j += 1
        k = j
        while k < len(q) and q[k][0] <= d:
            e, f = max(q[k][0], c), min(q[k][1], d)
            if max(c, e - b) <= f - a:
                out.append((max(c, e - b), f - a))
            k += 1
    return merged(out)


def gaps(p: Intervals, lo: float, hi: float) -> Intervals:
    """The parts of [lo, hi] outside p, as the closures of the open gaps."""
    inside = intersection(p, [(lo, hi)])
    ends = [lo, *(end for interval in inside for end in interval), hi]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b or not inside]


def holds(p: Intervals, t: float) -> bool:
    """Whether the time t lies in p."""
    return any(lo <= t <= hi for lo, hi in p)
