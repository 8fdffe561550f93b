"""Families of problems about figures and coordinates."""

from __future__ import annotations

import math
from fractions import Fraction

from problem import Draw, Problem, family, latex

TRIPLES = [(3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29)]
RADICAL = "Give your answer in simplest radical form."


def root(square: int) -> str:
    """The square root in LaTeX, simplified."""
    outside = max(k for k in range(1, math.isqrt(square) + 1) if square % (k * k) == 0)
    inside = square // (outside * outside)
    if inside == 1:
        return str(outside)
    return f"{'' if outside == 1 else outside}\\sqrt{{{inside}}}"


@family("geometry")
def right_triangle(draw: Draw) -> Problem:
    k = draw.randint(1, 5)
    a, b, c = (k * side for side in draw.choice(TRIPLES))
    asked, value = draw.choice(
        [
            ("its area", Fraction(a * b, 2)),
            ("its perimeter", Fraction(a + b + c)),
            ("the altitude to the hypotenuse", Fraction(a * b, c)),
            ("the radius of the inscribed circle", Fraction(a + b - c, 2)),
        ]
    )
    text = f"A right triangle has a leg of length {a} and a hypotenuse of length {c}. What is {asked}?"
    return Problem(text, latex(value))


@family("geometry")
def distance(draw: Draw) -> Problem:
    x, y = draw.randint(-9, 9), draw.randint(-9, 9)
    p, q = draw.randint(-9, 9), draw.randint(-9, 9)
    while (x, y) == (p, q):
        q = draw.randint(-9, 9)
    text = f"What is the distance between $({x}, {y})$ and $({p}, {q})$? {RADICAL}"
    return Problem(text, root((x - p) ** 2 + (y - q) ** 2))


@family("geometry")
def coordinate_area(draw: Draw) -> Problem:
    points = [(draw.randint(-8, 8), draw.randint(-8, 8)) for _ in range(3)]
    (a, b), (c, d), (e, f) = points
    double = abs((c - a) * (f - b) - (e - a) * (d - b))
    if not double:
        return coordinate_area(draw)
    named = ", ".join(f"$({x}, {y})$" for x, y in points)
    return Problem(f"What is the area of the triangle with vertices {named}?", latex(Fraction(double, 2)))


@family("geometry")
def polygon_angle(draw: Draw) -> Problem:
    sides = draw.choice([5, 6, 8, 9, 10, 12, 15, 18, 20, 24, 30, 36])
    if draw.random() < 0.5:
        text = f"How many degrees is each interior angle of a regular polygon with {sides} sides?"
        return Problem(text, latex(180 - Fraction(360, sides)))
    angle = latex(180 - Fraction(360, sides))
    diagonals = sides * (sides - 3) // 2
    text = f"Each interior angle of a regular polygon has {angle} degrees. How many diagonals does it have?"
    return Problem(text, latex(diagonals))


@family("geometry", held_out=True)
def box_diagonal(draw: Draw) -> Problem:
    a, b, c = (draw.randint(1, 12) for _ in range(3))
    if draw.random() < 0.5:
        text = f"A box has edges of lengths {a}, {b} and {c}. How long is its space diagonal? {RADICAL}"
        return Problem(text, root(a * a + b * b + c * c))
    text = f"A box has edges of lengths {a}, {b} and {c}. What is its total surface area?"
    return Problem(text, latex(2 * (a * b + b * c + c * a)))
