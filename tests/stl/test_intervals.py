"""Operations on unions of closed intervals, against their definitions on a grid of times.

With whole endpoints and windows, membership changes at whole numbers only, so that a grid of halves decides it.
"""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stl.intervals import always, eventually, gaps, holds, intersection, merged, union, until

GRID = [k / 2 for k in range(-40, 81)]


@st.composite
def unions(draw):
    ends = draw(st.lists(st.integers(0, 20), max_size=8))
    spans = sorted((min(a, b), max(a, b)) for a, b in zip(ends[::2], ends[1::2], strict=False))
    out = merged(spans)
    if out and draw(st.booleans()):
        out[-1] = (out[-1][0], math.inf)
    return out


windows = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)


def times(lo, hi):
    return [lo + k / 2 for k in range(int(2 * (hi - lo)) + 1)]


def same(result, truth):
    """The result is a well-formed union that holds exactly where the definition says."""
    assert all(lo <= hi for lo, hi in result)
    assert all(a[1] < b[0] for a, b in zip(result, result[1:], strict=False))
    for t in GRID:
        assert holds(result, t) == truth(t), (t, result)


@settings(max_examples=200, deadline=None)
@given(unions(), unions(), windows)
def test_operations_are_what_their_names_say(p, q, window):
    a, b = window
    same(union(p, q), lambda t: holds(p, t) or holds(q, t))
    same(intersection(p, q), lambda t: holds(p, t) and holds(q, t))
    same(eventually(p, a, b), lambda t: any(holds(p, s) for s in times(t + a, t + b)))
    same(always(p, a, b), lambda t: all(holds(p, s) for s in times(t + a, t + b)))
    same(
        until(p, q, a, b),
        lambda t: any(holds(q, s) and all(holds(p, r) for r in times(t, s)) for s in times(t + a, t + b)),
    )


@settings(max_examples=200, deadline=None)
@given(unions(), unions(), windows, windows)
def test_identities(p, q, one, two):
    (a, b), (c, d) = one, two
    everywhere = [(-math.inf, math.inf)]
    assert eventually(p, a, b) == until(everywhere, p, a, b)
    assert eventually(eventually(p, a, b), c, d) == eventually(p, a + c, b + d)
    assert always(always(p, a, b), c, d) == always(p, a + c, b + d)
    assert eventually(union(p, q), a, b) == union(eventually(p, a, b), eventually(q, a, b))
    assert always(intersection(p, q), a, b) == intersection(always(p, a, b), always(q, a, b))
    assert until(p, q, 0, b) == intersection(p, until(p, q, 0, b))
    assert until(p, union(q, p), a, b) == union(until(p, q, a, b), until(p, p, a, b))
    assert always(eventually(p, 0, 0), 0, 0) == p


@settings(max_examples=200, deadline=None)
@given(unions(), windows)
def test_gaps_are_the_complement_within_a_window(p, window):
    lo, hi = window
    missing = gaps(p, lo, hi)
    for t in times(lo, hi):
        inside = any(a < t < b for a, b in missing) or (lo == hi and bool(missing))
        edge = any(t in gap for gap in missing)
        assert edge or inside != holds(p, t)
    assert bool(missing) == (not any(a <= lo and hi <= b for a, b in p))


def test_touching_intervals_are_one_and_instants_count():
    assert union([(0, 1)], [(1, 2)]) == [(0, 2)]
    assert until([(0, 1), (3, 3)], [(1, 3)], 0, 5) == [(0, 1), (3, 3)]
    assert until([(0, 1)], [(2, 3)], 0, 5) == []
    assert always([(2, math.inf)], 1, 5) == [(1, math.inf)]
