"""What an answer may be: a quantity, several, a tuple, an interval, an equation, a matrix, or words."""

from __future__ import annotations

from typing import NamedTuple

from strop.rewards.rules.maths import regions
from strop.rewards.rules.maths.nodes import Node
from strop.rewards.rules.maths.quantities import Quantity
from strop.rewards.rules.maths.regions import Region


class Words(NamedTuple):
    """A text, in lower case, without spaces and punctuation."""

    text: str


class Unordered(NamedTuple):
    """Answers without order: a list or a set."""

    items: tuple[Answer, ...]


class Ordered(NamedTuple):
    """A tuple, vector or interval, with its brackets."""

    opening: str
    items: tuple[Answer, ...]
    closing: str


class Ratio(NamedTuple):
    """Numbers with colons between them."""

    items: tuple[Node, ...]
    is_time: bool = False
    """A later number is written with a zero before it, as in 3:05; it is compared number by number."""


class Matrix(NamedTuple):
    rows: tuple[tuple[Answer, ...], ...]


class Named(NamedTuple):
    """The value of a variable, x = 5; the name of several variables is a tuple of them."""

    name: str
    value: Answer


class Statement(NamedTuple):
    """An equation or inequality: the difference of its sides is 0, or below 0 (<, \\le), or not 0 (\\ne)."""

    relation: str
    difference: Node
    value: Quantity | None = None
    """5 in m + n = 5 (`stated_number`)."""


class Contradiction(NamedTuple):
    """A false equation between numbers, which no answer equals."""

    text: str


Answer = Quantity | Words | Unordered | Ordered | Ratio | Matrix | Named | Statement | Contradiction | Region


def as_region(answer: Answer) -> Region | None:
    """Return an interval with numbers at its ends as a region; None if it is none."""
    if isinstance(answer, Region):
        return answer
    if not isinstance(answer, Ordered) or len(answer.items) != 2:
        return None
    if answer.opening not in ("(", "[") or answer.closing not in (")", "]"):
        return None
    low, high = answer.items
    if not isinstance(low, Quantity) or not isinstance(high, Quantity):
        return None
    return regions.interval(low.node, high.node, answer.opening == "[", answer.closing == "]")
