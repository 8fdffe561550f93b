"""The tree of an expression, and what can be wrong with an answer."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Unreadable(ValueError):
    """The text is not an expression that we can read."""


class Undefined(ValueError):
    """The expression has no value: a division by zero, or a point outside of its domain."""


class TooLarge(ValueError):
    """A number is larger than we compute with."""


class Number(NamedTuple):
    """A rational number; a decimal has significant `digits`, and `places` behind its point."""

    value: Fraction
    digits: int = 0
    places: int = 0


class Symbol(NamedTuple):
    """A variable, or one of the constants e, i, \\pi and \\infty."""

    name: str


class Apply(NamedTuple):
    """An operator (+ - * / ^ neg) or a function with its arguments."""

    operator: str
    arguments: tuple[Node, ...]


Node = Number | Symbol | Apply

E = Symbol("e")
I = Symbol("i")
PI = Symbol("\\pi")
INFINITY = Symbol("\\infty")
CONSTANTS = {E, I, PI, INFINITY}


def symbols(node: Node) -> set[str]:
    """Return the names of all symbols in the expression, constants included."""
    if isinstance(node, Symbol):
        return {node.name}
    found: set[str] = set()
    if isinstance(node, Apply):
        for argument in node.arguments:
            found |= symbols(argument)
    return found


def variables(node: Node) -> set[str]:
    """Return the names of the variables in the expression."""
    return symbols(node) - {constant.name for constant in CONSTANTS}


def operators(node: Node) -> set[str]:
    """Return the operators and functions in the expression."""
    if not isinstance(node, Apply):
        return set()
    found = {node.operator}
    for argument in node.arguments:
        found |= operators(argument)
    return found


def has_only_symbols(node: Node) -> bool:
    """Whether the expression is made of symbols, without numbers: m + n, the length |AB|, or sin A."""
    if isinstance(node, Apply):
        named = node.operator in ("+", "-", "*", "/", "abs", "sin", "cos", "tan", "cot", "sec", "csc")
        return named and all(map(has_only_symbols, node.arguments))
    return isinstance(node, Symbol)
