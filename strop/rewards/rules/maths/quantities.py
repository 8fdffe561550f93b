"""A quantity: an expression with a unit, a currency sign, a percent sign or degrees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from strop.rewards.rules.maths.expressions import parse_expression
from strop.rewards.rules.maths.nodes import (
    PI,
    Apply,
    Node,
    Number,
    TooLarge,
    Undefined,
    Unreadable,
    has_only_symbols,
    operators,
    variables,
)
from strop.rewards.rules.maths.tokens import FUNCTION_NAMES, Token
from strop.rewards.rules.maths.units import (
    DEGREE,
    MULTIPLIERS,
    NO_UNIT,
    PERCENT,
    SIGNS,
    Unit,
    currency,
    parse_unit,
    same_unit,
)
from strop.rewards.rules.maths.values import evaluate, identical, inexact, is_real

APPROXIMATE_DIGITS = 7
"""A decimal with so many significant digits stands for the irrational number that it rounds."""


class Quantity(NamedTuple):
    node: Node
    unit: Unit

    def rounds(self, other: Quantity, *, digits: int = 1) -> bool:
        """Whether this is a decimal of at least so many digits to which the other, irrational, is rounded."""
        node = self.node
        sign = 1
        if isinstance(node, Apply) and node.operator == "neg":
            node = node.arguments[0]
            sign = -1
        if not isinstance(node, Number) or node.digits < digits or node.digits == 0:
            return False
        try:
            value = evaluate(other.node)
        except (Undefined, TooLarge):
            return False
        if isinstance(value, Fraction) or not is_real(value):
            return False
        distance = abs(inexact(node.value * sign) - value)
        return bool(distance <= inexact(Fraction(10) ** -node.places / 2))


def same_quantity(left: Quantity, right: Quantity) -> bool:
    """Whether two quantities are equal. A quantity without unit is in the unit of the other."""
    if not same_unit(left.unit, right.unit):
        return False
    if left.unit != NO_UNIT and right.unit != NO_UNIT:
        return identical(_scaled(left.node, left.unit.factor), _scaled(right.node, right.unit.factor))
    if identical(left.node, right.node):
        return True
    for one, other in ((left, right), (right, left)):
        if one.unit == PERCENT and identical(_scaled(one.node, Fraction(1, 100)), other.node):
            return True
        if one.unit == DEGREE:
            radians = Apply("*", (_scaled(one.node, Fraction(1, 180)), PI))
            return identical(radians, other.node)
    return False


def has_variables(quantity: Quantity) -> bool:
    """Whether the quantity depends on a variable."""
    return bool(variables(quantity.node))


def stated_number(left: Quantity, right: Quantity) -> Quantity | None:
    """Return 5 of m + n = 5 and of 5 = m + n: the number, if the other side names what is asked for.

    x + 1 = 5 is an equation to be solved; 10a + b = 5, in two variables, is none.
    """
    for named, number in ((left, right), (right, left)):
        if not has_variables(number) and (len(variables(named.node)) > 1 or has_only_symbols(named.node)):
            return number
    return None


def contradict(quantities: Sequence[Quantity]) -> bool:
    """Whether two neighbours of a chain of equations are different."""
    for left, right in itertools.pairwise(quantities):
        try:
            if not identical(left.node, right.node) and not (left.rounds(right) or right.rounds(left)):
                return True
        except (Undefined, TooLarge):
            return True
    return False


def _scaled(node: Node, factor: Fraction) -> Node:
    if factor == 1:
        return node
    return Apply("*", (node, Number(factor)))


def parse_quantity(tokens: list[Token]) -> Quantity:
    """Read an expression and its unit; Unreadable if it is none."""
    tokens, sign_unit = _without_currency(tokens)
    words = [position for position, token in enumerate(tokens) if _is_unit_word(token)]
    if not words:
        return _measured(tokens, sign_unit)
    head = tokens[: words[0]]
    tail = tokens[words[0] :]
    if not head:
        raise Unreadable("A unit without a number.")
    if any(
        token.kind == "number" and tail[index - 1].text not in ("^", "{") for index, token in enumerate(tail)
    ):
        return _compound(tokens)
    factor = Fraction(1)
    while tail and tail[0].text.lower() in MULTIPLIERS:
        factor *= MULTIPLIERS[tail[0].text.lower()]
        tail = tail[1:]
    unit = _unit(tail)
    if (unit.words or unit == NO_UNIT) and all(token.kind in ("letter", "word") for token in head):
        raise Unreadable("Words, and no number.")
    quantity = _measured(head, sign_unit)
    if unit == NO_UNIT:
        unit = quantity.unit
    elif quantity.unit not in (NO_UNIT, unit):
        raise Unreadable("A quantity with two units.")
    return Quantity(_scaled(quantity.node, factor), unit)


def sum_of_units(quantities: list[Quantity]) -> Quantity | None:
    """Return the sum of quantities in different units of one dimension (2 dollars and 5 cents), else None."""
    units = {quantity.unit for quantity in quantities}
    dimensions = {unit.dimensions for unit in units}
    if len(units) < len(quantities) or len(dimensions) > 1 or any(unit.words for unit in units):
        return None
    total: Node = Number(Fraction(0))
    for quantity in quantities:
        total = Apply("+", (total, _scaled(quantity.node, quantity.unit.factor)))
    return Quantity(total, Unit(dimensions.pop()))


def _is_unit_word(token: Token) -> bool:
    return token.kind == "word"


def _without_currency(tokens: list[Token]) -> tuple[list[Token], Unit]:
    """Return the tokens without one currency sign, and its unit."""
    signs = [token.text for token in tokens if token.text in SIGNS]
    if len(signs) != 1:
        return tokens, NO_UNIT
    return [token for token in tokens if token.text not in SIGNS], currency(signs[0])


def _measured(tokens: list[Token], unit: Unit) -> Quantity:
    """Read an expression that may end in a percent or degree sign."""
    texts = [token.text for token in tokens]
    length = 0
    if texts[-2:] == ["^", "\\circ"]:
        length = 2
    elif texts[-4:] == ["^", "{", "\\circ", "}"]:
        length = 4
    if length:
        node = parse_expression(tokens[:-length])
        if not operators(node) & set(FUNCTION_NAMES):
            return Quantity(node, DEGREE)
    if texts and texts[-1] in ("%", "\\%"):
        return Quantity(parse_expression(tokens[:-1]), PERCENT)
    return Quantity(parse_expression(tokens), unit)


def _unit(tail: list[Token]) -> Unit:
    """Return the unit of the words behind a number; Unreadable if they are none."""
    parts = []
    for token in tail:
        if token.text in ("{", "}", ".", "-"):
            continue
        if token.kind not in ("word", "letter", "number") and token.text not in ("/", "^"):
            raise Unreadable(f"{token.text!r} is no part of a unit.")
        parts.append(token.text)
    unit = parse_unit(parts)
    if unit is None:
        raise Unreadable(f"{' '.join(parts)!r} is no unit.")
    return unit


def _compound(tokens: list[Token]) -> Quantity:
    """Read a quantity in two or more units of one dimension, as 5 ft 10 inches."""
    total = Fraction(0)
    dimensions = None
    position = 0
    while position < len(tokens):
        end = position + 1
        while end < len(tokens) and tokens[end].kind == "word":
            end += 1
        node = parse_expression(tokens[position : position + 1])
        if not isinstance(node, Number) or end == position + 1:
            raise Unreadable("Numbers and units do not alternate.")
        unit = _unit(tokens[position + 1 : end])
        if unit.words or unit == NO_UNIT or dimensions not in (None, unit.dimensions):
            raise Unreadable("The units do not measure the same.")
        dimensions = unit.dimensions
        total += node.value * unit.factor
        position = end
    return Quantity(Number(total), Unit(dimensions or ()))
