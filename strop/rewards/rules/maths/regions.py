"""Sets of real numbers that inequalities and unions of intervals describe."""

from __future__ import annotations

from typing import NamedTuple

from strop.rewards.rules.maths.nodes import (
    INFINITY,
    Apply,
    Node,
    Symbol,
    TooLarge,
    Undefined,
    variables,
)
from strop.rewards.rules.maths.values import Value, evaluate, inexact, is_real, same_value

_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}


class Piece(NamedTuple):
    """An interval; its ends are numbers or infinite."""

    low: Value
    high: Value
    low_closed: bool
    high_closed: bool


class Region(NamedTuple):
    """A union of intervals that do not touch, in order."""

    pieces: tuple[Piece, ...]


def _end(node: Node) -> Value | None:
    try:
        value = evaluate(node)
    except (Undefined, TooLarge):
        return None
    if not is_real(value):
        return None
    return value


def interval(low: Node, high: Node, low_closed: bool, high_closed: bool) -> Region | None:
    """Return the interval; None if its ends are no numbers in order."""
    first = _end(low)
    last = _end(high)
    if first is None or last is None:
        return None
    piece = Piece(first, last, low_closed, high_closed)
    if _is_empty(piece):
        return None
    return Region((piece,))


def _below(left: Value, right: Value) -> bool:
    return not same_value(left, right) and bool(inexact(left) < inexact(right))


def _is_empty(piece: Piece) -> bool:
    if same_value(piece.low, piece.high):
        return not (piece.low_closed and piece.high_closed)
    return not _below(piece.low, piece.high)


EVERYTHING = Region((Piece(evaluate(Apply("neg", (INFINITY,))), evaluate(INFINITY), False, False),))
_LOWEST = EVERYTHING.pieces[0].low
_HIGHEST = EVERYTHING.pieces[0].high


def union(regions: list[Region]) -> Region:
    """Return the union; intervals that touch become one."""
    pieces = [piece for region in regions for piece in region.pieces]
    pieces.sort(key=lambda piece: (inexact(piece.low), not piece.low_closed))
    merged: list[Piece] = []
    for piece in pieces:
        if merged and _touch(merged[-1], piece):
            merged[-1] = _joined(merged[-1], piece)
        else:
            merged.append(piece)
    return Region(tuple(merged))


def _touch(first: Piece, second: Piece) -> bool:
    if same_value(first.high, second.low):
        return first.high_closed or second.low_closed
    return _below(second.low, first.high)


def _joined(first: Piece, second: Piece) -> Piece:
    if same_value(first.high, second.high):
        return first._replace(high_closed=first.high_closed or second.high_closed)
    if _below(first.high, second.high):
        return Piece(first.low, second.high, first.low_closed, second.high_closed)
    return first


def intersection(regions: list[Region]) -> Region:
    """Return what all regions have in common."""
    common = EVERYTHING.pieces
    for region in regions:
        common = tuple(
            both for one in common for other in region.pieces if not _is_empty(both := _overlap(one, other))
        )
    return Region(common)


def _overlap(one: Piece, other: Piece) -> Piece:
    low, low_closed = one.low, one.low_closed
    if same_value(one.low, other.low):
        low_closed = one.low_closed and other.low_closed
    elif _below(one.low, other.low):
        low, low_closed = other.low, other.low_closed
    high, high_closed = one.high, one.high_closed
    if same_value(one.high, other.high):
        high_closed = one.high_closed and other.high_closed
    elif _below(other.high, one.high):
        high, high_closed = other.high, other.high_closed
    return Piece(low, high, low_closed, high_closed)


def same_region(left: Region, right: Region) -> bool:
    """Whether both have the same intervals."""
    if len(left.pieces) != len(right.pieces):
        return False
    for one, other in zip(left.pieces, right.pieces):
        if (one.low_closed, one.high_closed) != (other.low_closed, other.high_closed):
            return False
        if not (same_value(one.low, other.low) and same_value(one.high, other.high)):
            return False
    return True


def solution(nodes: list[Node], relations: list[str]) -> Region | None:
    """Return the numbers that a chain of inequalities between one variable and numbers allows; None if it is
    another."""
    symbols = [node for node in nodes if isinstance(node, Symbol) and variables(node)]
    if len(symbols) != 1:
        return None
    found: list[Region] = []
    for index, relation in enumerate(relations):
        left, right = nodes[index], nodes[index + 1]
        if right in symbols:
            left, right = right, left
            relation = _FLIPPED[relation]
        if left not in symbols:
            return None
        bound = _end(right)
        if bound is None:
            return None
        found.append(_half_line(relation, bound))
    return intersection(found)


def _half_line(relation: str, bound: Value) -> Region:
    below = Piece(_LOWEST, bound, False, relation == "\\le")
    above = Piece(bound, _HIGHEST, relation == "\\ge", False)
    if relation in ("<", "\\le"):
        return Region((below,))
    if relation in (">", "\\ge"):
        return Region((above,))
    return Region((below, above))
