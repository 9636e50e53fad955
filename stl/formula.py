"""Signal temporal logic formulas: the tree, its parser and its printed form.

Grammar (windows are decimals, in seconds, relative to the time at which the formula is evaluated):

    or    := and ('|' and)*
    and   := until ('&' until)*
    until := unary ('U[a,b]' until)?
    unary := 'F[a,b]' unary | 'G[a,b]' unary | '(' or ')' | 'in(NAME)' | 'out(NAME)'

`str(tree)` parses back to an equal tree.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

MAX_LENGTH = 4000  # characters of one formula
MAX_DEPTH = 40  # operators and parentheses inside each other
NAME = r"[\w.\-]{1,64}"  # what a region or an obstacle may be called


class FormulaError(ValueError):
    """A formula that does not parse; one line says what is wrong and what would be right."""


class _Node:
    def __str__(self) -> str:
        """The formula as it is parsed, with as few parentheses as the grammar allows."""
        def operand(child: Formula, least: int) -> str:
            return str(child) if _BINDING.get(type(child), 3) >= least else f"({child})"

        match self:
            case In(region) | Out(region):
                return f"{type(self).__name__.lower()}({region})"
            case And(args):
                return " & ".join(operand(arg, 2) for arg in args)
            case Or(args):
                return " | ".join(operand(arg, 1) for arg in args)
            case Until(a, b, left, right):
                return f"{operand(left, 3)} U[{decimal(a)},{decimal(b)}] {operand(right, 2)}"
            case F(a, b, arg) | G(a, b, arg):
                return f"{type(self).__name__}[{decimal(a)},{decimal(b)}] {operand(arg, 3)}"


@dataclass(frozen=True)
class In(_Node):  # the body is fully inside the region
    region: str


@dataclass(frozen=True)
class Out(_Node):  # the body does not overlap the region's interior
    region: str


@dataclass(frozen=True)
class And(_Node):
    args: tuple[Formula, ...]  # at least two


@dataclass(frozen=True)
class Or(_Node):
    args: tuple[Formula, ...]  # at least two


@dataclass(frozen=True)
class F(_Node):  # arg holds at some time of the window
    a: float
    b: float
    arg: Formula


@dataclass(frozen=True)
class G(_Node):  # arg holds at all times of the window
    a: float
    b: float
    arg: Formula


@dataclass(frozen=True)
class Until(_Node):  # right holds at some t' of the window, left at every time from now to t', both ends included
    a: float
    b: float
    left: Formula
    right: Formula


Formula = In | Out | And | Or | F | G | Until
_BINDING = {Or: 0, And: 1, Until: 2}  # the grammar's levels; everything else binds tightest, at 3


def decimal(value: float) -> str:
    """The shortest decimal that reads back as `value`, without an exponent: 7.0 -> 7, 0.1 -> 0.1."""
    return np.format_float_positional(value, trim="-")


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


def brief(value: object) -> str:
    """A bounded one-line picture of any value, for error messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more than 4300 digits does not print
        return "a huge number"


def cut(text: str, most: int) -> str:
    """The text, or as much of it as fits into `most` characters, with a sign that more was there."""
    return text if len(text) <= most else text[: most - 4] + " ..."


def nearest(name: object, names: Collection[str]) -> str:
    """A hint for a misspelt name, to end an error message with; empty when nothing is close."""
    close = difflib.get_close_matches(name[:64], names, n=1) if isinstance(name, str) else ()
    return f" (did you mean '{close[0]}'?)" if close else ""


def parse(text: str, regions: Collection[str] | None = None) -> Formula:
    """Parse one formula. With `regions`, its names must be among them. Raises FormulaError."""
    if not isinstance(text, str):
        raise FormulaError(f"a formula must be a string such as 'F[0,10] in(A)', not {brief(text)}")
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"a formula of {len(text)} characters: at most {MAX_LENGTH} are allowed")
    return _Parser(text, regions).whole()


_NUMBER = r"[0-9]+\.?[0-9]*|\.[0-9]+"
_TOKEN = re.compile(
    rf"(?P<atom>in|out)\s*\(\s*(?P<name>{NAME})\s*\)"
    rf"|(?P<window>[FGU])\s*\[\s*(?P<a>{_NUMBER})\s*,\s*(?P<b>{_NUMBER})\s*\]|(?P<sign>[&|()])"
)
_SPACE = re.compile(r"\s*")


class _Parser:
    """Recursive descent with one token of look-ahead; `kind` is one of & | ( ) F G U, "atom" or "end"."""

    def __init__(self, text: str, regions: Collection[str] | None):
        self.text, self.regions, self.next = text, regions, 0
        self.advance()

    def fail(self, problem: str) -> NoReturn:
        raise FormulaError(f"formula {cut(self.text, 80)!r}: {problem}")

    def unexpected(self, wanted: str) -> NoReturn:
        found = repr(self.text[self.start : self.start + 20]) if self.start < len(self.text) else "the end"
        self.fail(f"expected {wanted} at position {self.start}, found {found}")

    def advance(self) -> None:
        self.start = _SPACE.match(self.text, self.next).end()
        self.token = _TOKEN.match(self.text, self.start)
        if self.token:
            self.next, self.kind = self.token.end(), self.token["sign"] or self.token["window"] or "atom"
        elif self.start < len(self.text):
            self.unexpected("in(NAME), out(NAME), F[a,b], G[a,b], U[a,b] with decimals a <= b, &, | or parentheses")
        else:
            self.kind = "end"

    def whole(self) -> Formula:
        tree = self.either(0)
        if self.kind != "end":
            self.unexpected("&, |, U[a,b] or the end")
        return tree

    def either(self, depth: int) -> Formula:
        return self.joined("|", Or, lambda: self.joined("&", And, lambda: self.until(depth)))

    def joined(self, sign: str, make: type, part: Callable[[], Formula]) -> Formula:
        args = [part()]
        while self.kind == sign:
            self.advance()
            args.append(part())
        return args[0] if len(args) == 1 else make(tuple(args))

    def until(self, depth: int) -> Formula:
        left = self.unary(depth)
        return Until(*self.window(), left, self.until(depth + 1)) if self.kind == "U" else left

    def unary(self, depth: int) -> Formula:
        if depth > MAX_DEPTH:  # well before Python's own limit of recursion
            self.fail(f"more than {MAX_DEPTH} operators and parentheses inside each other")
        if self.kind in ("F", "G"):
            return (F if self.kind == "F" else G)(*self.window(), self.unary(depth + 1))
        if self.kind == "(":
            self.advance()
            tree = self.either(depth + 1)
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
            self.fail(f"a window [a,b] needs finite decimals 0 <= a <= b; found {self.token[0][:40]!r}")
        self.advance()
        return a, b

    def atom(self) -> Formula:
        make, name = (In if self.token["atom"] == "in" else Out), self.token["name"]
        if self.regions is not None and name not in self.regions:
            shown = ", ".join(list(self.regions)[:40]) or "none"
            self.fail(f"unknown region '{name}'{nearest(name, self.regions)}; the regions are {shown}")
        self.advance()
        return make(name)
