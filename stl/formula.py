"""Signal temporal logic formulas: the tree, its parser and its printed form.

Grammar (windows in seconds, relative to the time at which the formula is evaluated):

    or    := and ('|' and)*
    and   := until ('&' until)*
    until := unary ('U[a,b]' until)?
    unary := 'F[a,b]' unary | 'G[a,b]' unary | '(' or ')' | 'in(NAME)' | 'out(NAME)'

`str(tree)` prints a formula with as few parentheses as this grammar allows, and parses back to an equal tree.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import NoReturn

MAX_LENGTH = 4000  # characters of one formula
MAX_DEPTH = 40  # nested operators and parentheses of one formula
NAME = r"[\w.\-]{1,64}"  # what a region or an obstacle may be called


class FormulaError(ValueError):
    """A formula that does not parse; one line says what is wrong and what would be right."""


@dataclass(frozen=True)
class In:
    """The body is fully inside the region."""

    region: str

    def __str__(self) -> str:
        return f"in({self.region})"


@dataclass(frozen=True)
class Out:
    """The body does not overlap the region's interior."""

    region: str

    def __str__(self) -> str:
        return f"out({self.region})"


@dataclass(frozen=True)
class And:
    args: tuple[Formula, ...]  # at least two

    def __str__(self) -> str:
        return " & ".join(_operand(arg, 2) for arg in self.args)


@dataclass(frozen=True)
class Or:
    args: tuple[Formula, ...]  # at least two

    def __str__(self) -> str:
        return " | ".join(_operand(arg, 1) for arg in self.args)


@dataclass(frozen=True)
class F:
    """`arg` holds at some time of the window."""

    a: float
    b: float
    arg: Formula

    def __str__(self) -> str:
        return f"F[{decimal(self.a)},{decimal(self.b)}] {_operand(self.arg, 3)}"


@dataclass(frozen=True)
class G:
    """`arg` holds at all times of the window."""

    a: float
    b: float
    arg: Formula

    def __str__(self) -> str:
        return f"G[{decimal(self.a)},{decimal(self.b)}] {_operand(self.arg, 3)}"


@dataclass(frozen=True)
class Until:
    """`right` holds at some t' of the window, and `left` at every time from now to t', both ends included."""

    a: float
    b: float
    left: Formula
    right: Formula

    def __str__(self) -> str:
        return f"{_operand(self.left, 3)} U[{decimal(self.a)},{decimal(self.b)}] {_operand(self.right, 2)}"


Formula = In | Out | And | Or | F | G | Until
_BINDING = {Or: 0, And: 1, Until: 2}  # all others bind tightest: 3


def _operand(node: Formula, least: int) -> str:
    return str(node) if _BINDING.get(type(node), 3) >= least else f"({node})"


def decimal(value: float) -> str:
    """The shortest decimal that reads back as `value`, without an exponent: 7.0 -> 7, 0.1 -> 0.1."""
    text = format(Decimal(repr(float(value))), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def children(node: Formula) -> tuple[Formula, ...]:
    """The direct subformulas, left to right."""
    if isinstance(node, And | Or):
        return node.args
    if isinstance(node, F | G):
        return (node.arg,)
    return (node.left, node.right) if isinstance(node, Until) else ()


def walk(node: Formula) -> Iterator[Formula]:
    """The node and everything below it, parents first, left to right."""
    yield node
    for child in children(node):
        yield from walk(child)


def horizon(node: Formula) -> float:
    """The last time in seconds that a formula evaluated at 0 can look at."""
    inner = max(map(horizon, children(node)), default=0.0)
    return inner + node.b if isinstance(node, F | G | Until) else inner


def depth(node: Formula) -> int:
    """How many temporal operators are nested in each other."""
    return isinstance(node, F | G | Until) + max(map(depth, children(node)), default=0)


def brief(value: object) -> str:
    """A bounded one-line picture of any value, for error messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more than 4300 digits does not print
        return "a huge number"


def nearest(name: object, names: Collection[str]) -> str:
    """A hint for a misspelt name, for the end of an error message; empty when nothing is close."""
    close = difflib.get_close_matches(str(name)[:64], names, n=1) if isinstance(name, str) else []
    return f" (did you mean '{close[0]}'?)" if close else ""


def listed(names: Collection[str], most: int = 30) -> str:
    """Names separated by commas, at most `most` of them."""
    shown = ", ".join(list(names)[:most]) or "none"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def parse(text: str, regions: Collection[str] | None = None) -> Formula:
    """Parse one formula. With `regions`, its names must be among them. Raises FormulaError."""
    if not isinstance(text, str):
        raise FormulaError(f"a formula must be a string such as 'F[0,10] in(A)', not {brief(text)}")
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"formula of {len(text)} characters: at most {MAX_LENGTH} are allowed")
    return _Parser(text, regions).whole()


_NUMBER = r"[0-9]+\.?[0-9]*|\.[0-9]+"
_TOKEN = re.compile(
    rf"(?P<atom>in|out)\s*\(\s*(?P<name>{NAME})\s*\)"
    rf"|(?P<window>[FGU])\s*\[\s*(?P<a>{_NUMBER})\s*,\s*(?P<b>{_NUMBER})\s*\]|(?P<sign>[&|()])"
)
_SPACE = re.compile(r"\s*")


class _Parser:
    """Recursive descent with one token of look-ahead; `kind` is '&', '|', '(', ')', 'F', 'G', 'U', 'atom' or 'end'."""

    def __init__(self, text: str, regions: Collection[str] | None):
        self.text, self.regions = text, regions
        self.next, self.level = 0, 0
        self.advance()

    def fail(self, problem: str) -> NoReturn:
        shown = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        raise FormulaError(f"formula {shown!r}: {problem}")

    def advance(self) -> None:
        self.start = _SPACE.match(self.text, self.next).end()
        self.token = _TOKEN.match(self.text, self.start)
        if self.token:
            self.next = self.token.end()
            self.kind = self.token["sign"] or self.token["window"] or "atom"
        elif self.start == len(self.text):
            self.kind = "end"
        else:
            self.unexpected("in(NAME), out(NAME), F[a,b], G[a,b], U[a,b] with decimals 0 <= a <= b, &, | or parentheses")

    def unexpected(self, wanted: str) -> NoReturn:
        found = repr(self.text[self.start : self.start + 20]) if self.start < len(self.text) else "the end"
        self.fail(f"expected {wanted} at position {self.start}, found {found}")

    def whole(self) -> Formula:
        tree = self.either()
        if self.kind != "end":
            self.unexpected("&, |, U[a,b] or the end")
        return tree

    def either(self) -> Formula:
        args = [self.both()]
        while self.kind == "|":
            self.advance()
            args.append(self.both())
        return args[0] if len(args) == 1 else Or(tuple(args))

    def both(self) -> Formula:
        args = [self.until()]
        while self.kind == "&":
            self.advance()
            args.append(self.until())
        return args[0] if len(args) == 1 else And(tuple(args))

    def until(self) -> Formula:
        self.level += 1
        if self.level > MAX_DEPTH:  # before Python's own recursion limit
            self.fail(f"nested more than {MAX_DEPTH} deep")
        left = self.unary()
        if self.kind == "U":
            a, b = self.window()
            left = Until(a, b, left, self.until())
        self.level -= 1
        return left

    def unary(self) -> Formula:
        if self.kind in ("F", "G"):
            operators = []
            while self.kind in ("F", "G"):
                operators.append((F if self.kind == "F" else G, *self.window()))
            if self.level + len(operators) > MAX_DEPTH:
                self.fail(f"nested more than {MAX_DEPTH} deep")
            self.level += len(operators)
            tree = self.unary()
            self.level -= len(operators)
            for operator, a, b in reversed(operators):
                tree = operator(a, b, tree)
            return tree
        if self.kind == "(":
            self.advance()
            tree = self.either()
            if self.kind != ")":
                self.unexpected("')'")
            self.advance()
            return tree
        if self.kind != "atom":
            self.unexpected("in(NAME), out(NAME), F[a,b], G[a,b] or '('")
        return self.atom()

    def window(self) -> tuple[float, float]:
        a, b = float(self.token["a"]), float(self.token["b"])
        if not a <= b < math.inf:
            self.fail(f"the window at position {self.start} needs 0 <= a <= b, finite; found {self.token[0][:40]!r}")
        self.advance()
        return a, b

    def atom(self) -> Formula:
        kind, name = (In if self.token["atom"] == "in" else Out), self.token["name"]
        if self.regions is not None and name not in self.regions:
            self.fail(f"unknown region '{name}'{nearest(name, self.regions)}; the regions are {listed(self.regions)}")
        self.advance()
        return kind(name)
