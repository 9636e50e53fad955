"""Formulas: printing then parsing gives the same tree; what is wrong gets one clear line."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stl.formula import MAX_DEPTH, And, F, FormulaError, G, In, Or, Out, Until, children, decimal, parse, walk

names = st.sampled_from(["A", "Key1", "Goal", "U", "in", "room-2", "x.y"])
numbers = st.one_of(st.integers(0, 10**6).map(float), st.decimals(0, 500, places=2).map(float), st.floats(0, 1e300))
windows = st.tuples(numbers, numbers).map(sorted)


def deeper(inner):
    pair = st.tuples(windows, inner, inner)
    several = st.lists(inner, min_size=2, max_size=4).map(tuple)
    return st.one_of(
        several.map(And),
        several.map(Or),
        pair.map(lambda p: F(*p[0], p[1])),
        pair.map(lambda p: G(*p[0], p[1])),
        pair.map(lambda p: Until(*p[0], p[1], p[2])),
    )


trees = st.recursive(st.one_of(names.map(In), names.map(Out)), deeper, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_print_then_parse_gives_the_same_tree(tree):
    assert parse(str(tree)) == tree


@pytest.mark.parametrize(
    "text, tree",
    [
        ("F[7,21] in(B)", F(7, 21, In("B"))),
        ("out(D) U[0,136] in(K)", Until(0, 136, Out("D"), In("K"))),
        ("F[153,169] G[0,5] in(Goal)", F(153, 169, G(0, 5, In("Goal")))),
        ("F[0,30] (in(A) & F[5,20] in(B))", F(0, 30, And((In("A"), F(5, 20, In("B")))))),
        ("F[0,40] in(B) | F[0,60] in(C)", Or((F(0, 40, In("B")), F(0, 60, In("C"))))),
        ("in(A) | in(B) & in(C)", Or((In("A"), And((In("B"), In("C")))))),
        ("in(A) & in(B) U[0,1] in(C)", And((In("A"), Until(0, 1, In("B"), In("C"))))),
        ("F[0,1] in(A) U[2,3] in(B)", Until(2, 3, F(0, 1, In("A")), In("B"))),
        ("in(A) U[0,1] in(B) U[2,3] in(C)", Until(0, 1, In("A"), Until(2, 3, In("B"), In("C")))),
        ("(in(A) U[0,1] in(B)) U[2,3] in(C)", Until(2, 3, Until(0, 1, In("A"), In("B")), In("C"))),
        ("in(A) & (in(B) & in(C)) & in(D)", And((In("A"), And((In("B"), In("C"))), In("D")))),
        ("  G [ .5 , 2. ]in( A )", G(0.5, 2, In("A"))),
        ("((in(A)))", In("A")),
    ],
)
def test_grammar(text, tree):
    assert parse(text) == tree
    assert parse(str(tree)) == tree


def test_printed_form_is_the_usual_one():
    for text in ("F[0,30] (in(A) & F[5,20] in(B))", "out(D) U[0,136.5] in(K)", "G[0,50] F[0,20] in(B)"):
        assert str(parse(text)) == text
    assert (decimal(7.0), decimal(0.1), decimal(1e22), decimal(1e-7)) == ("7", "0.1", "1" + "0" * 22, "0.0000001")


def test_walk_visits_parents_first():
    tree = parse("F[0,1] (in(A) & out(B)) U[0,2] in(C)")
    assert [str(n) for n in walk(tree)][1:] == ["F[0,1] (in(A) & out(B))", "in(A) & out(B)", "in(A)", "out(B)", "in(C)"]
    assert children(tree)[1] == In("C")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "position 0, found the end"),
        ("in(A", "position 0"),
        ("in(A) in(B)", "position 6, found 'in(B)'"),
        ("in(A) &", "found the end"),
        ("(in(A)", "')'"),
        ("F[0,5] U[0,1] in(A)", "position 7"),
        ("F[5,1] in(A)", "0 <= a <= b"),
        ("F[-1,1] in(A)", "position 0"),
        ("F[0,1e3] in(A)", "position 0"),
        ("F[0,inf] in(A)", "position 0"),
        ("F[0," + "9" * 400 + "] in(A)", "finite"),
        ("F[٠,٣] in(A)", "position 0"),
        ("not in(A)", "position 0"),
        ("!in(A)", "position 0"),
        ("in(A) && in(B)", "position 7"),
        ("in(A) U in(B)", "position 6"),
        ("in(Dor1)", "(did you mean 'Door1'?); the regions are A, B, Door1"),
        ("__import__('os')", "position 0"),
        (None, "must be a string"),
        (b"in(A)", "must be a string"),
        (["in(A)"], "must be a string"),
        ([10**5000], "must be a string"),
    ],
)
def test_errors_are_one_clear_line(text, words):
    with pytest.raises(FormulaError) as caught:
        parse(text, ["A", "B", "Door1"])
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1900 + "in(A)" + ")" * 1900,
        "(" * 10**6,
        "F[0,1]" * 600 + "in(A)",
        "in(A)" + "U[0,1]in(A)" * 300,
        "G[0,1](" * 500 + "in(A)" + ")" * 499,
        " " * 3999 + "x",
        "in(" + " " * 3990,
        "F[" + "1" * 3990,
    ],
)
def test_deep_or_long_text_is_an_error_and_quick(text):
    start = time.process_time()
    with pytest.raises(FormulaError):
        parse(text)
    assert time.process_time() - start < 1  # a bound on size, not a measure of speed


def test_depth_up_to_the_limit_is_fine():
    deep = "(" * MAX_DEPTH + "in(A)" + ")" * MAX_DEPTH
    assert parse(deep) == In("A")
    assert parse("F[0,1]" * MAX_DEPTH + "in(A)").b == 1
    assert len(list(walk(parse(" & ".join(["in(A)"] * 400))))) == 401


@settings(max_examples=300, deadline=None)
@given(st.text("inout()AFGU[]0123,.&| ", max_size=40))
def test_any_text_parses_or_is_a_formula_error(text):
    with contextlib.suppress(FormulaError):
        assert parse(str(parse(text))) == parse(text)
