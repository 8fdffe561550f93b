"""A mathematical problem: its text and its answer in LaTeX.

A family is a function `family(draw) -> Problem` that chooses parameters and computes the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

Draw = random.Random
Family = Callable[[Draw], "Problem"]
FAMILIES: dict[str, tuple[str, bool, Family]] = {}
"""Name: (subject, held out, family)."""


@dataclass(frozen=True)
class Problem:
    text: str
    answer: str


def family(subject: str, *, held_out: bool = False) -> Callable[[Family], Family]:
    """Register a family; one that is held out is never trained on."""

    def register(function: Family) -> Family:
        FAMILIES[function.__name__] = (subject, held_out, function)
        return function

    return register


def nonzero(draw: Draw, most: int) -> int:
    """From -most to most, but not 0."""
    return draw.choice([-1, 1]) * draw.randint(1, most)


def latex(value: int | Fraction) -> str:
    number = Fraction(value)
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return f"{sign}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def polynomial(coefficients: list[int], name: str = "x") -> str:
    """`[2, -1, 0, 5]` is 2x^3 - x^2 + 5."""
    text = ""
    for power, coefficient in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if not coefficient:
            continue
        size = str(abs(coefficient))
        if abs(coefficient) == 1 and power:
            size = ""
        variable = {0: "", 1: name}.get(power, f"{name}^{power}")
        sign = " + "
        if coefficient < 0:
            sign = " - "
        if not text:
            sign = sign.strip().replace("+", "")
        text += f"{sign}{size}{variable}"
    return text or "0"
