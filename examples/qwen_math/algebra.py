"""Families of problems about equations, polynomials, sequences and logarithms."""

from __future__ import annotations

from fractions import Fraction

from problem import Draw, Problem, family, latex, nonzero, polynomial


@family("algebra")
def linear_equation(draw: Draw) -> Problem:
    a, c = draw.sample([n for n in range(-9, 10) if n], 2)
    b, d = nonzero(draw, 30), nonzero(draw, 30)
    text = f"Solve for $x$: ${polynomial([a, b])} = {polynomial([c, d])}$."
    return Problem(text, latex(Fraction(d - b, a - c)))


@family("algebra")
def two_equations(draw: Draw) -> Problem:
    x, y = draw.randint(-9, 9), draw.randint(-9, 9)
    a, b, c, d = (nonzero(draw, 7) for _ in range(4))
    while a * d == b * c:
        d = nonzero(draw, 8)
    first = f"{polynomial([a, 0])} {_signed(b, 'y')} = {a * x + b * y}"
    second = f"{polynomial([c, 0])} {_signed(d, 'y')} = {c * x + d * y}"
    p, q = draw.randint(1, 4), nonzero(draw, 4)
    asked = f"{polynomial([p, 0])} {_signed(q, 'y')}"
    text = f"If ${first}$ and ${second}$, what is the value of ${asked}$?"
    return Problem(text, latex(p * x + q * y))


def _signed(coefficient: int, name: str) -> str:
    size = "" if abs(coefficient) == 1 else str(abs(coefficient))
    return f"{'-' if coefficient < 0 else '+'} {size}{name}"


@family("algebra")
def larger_root(draw: Draw) -> Problem:
    r, s = draw.sample(range(-12, 13), 2)
    a = draw.randint(1, 4)
    equation = polynomial([a, -a * (r + s), a * r * s])
    return Problem(f"What is the larger solution of ${equation} = 0$?", latex(max(r, s)))


@family("algebra", held_out=True)
def least_value(draw: Draw) -> Problem:
    a, b, c = draw.randint(1, 5), nonzero(draw, 12), nonzero(draw, 20)
    text = f"What is the least value of ${polynomial([a, b, c])}$ over all real numbers $x$?"
    return Problem(text, latex(c - Fraction(b * b, 4 * a)))


@family("intermediate algebra")
def roots_symmetric(draw: Draw) -> Problem:
    a, b, c = draw.randint(1, 5), nonzero(draw, 12), nonzero(draw, 12)
    total, product = Fraction(-b, a), Fraction(c, a)
    kinds = [
        ("r^2 + s^2", total * total - 2 * product),
        ("\\frac{1}{r} + \\frac{1}{s}", total / product),
        ("(r + 1)(s + 1)", product + total + 1),
        ("r^2 s + r s^2", total * product),
    ]
    asked, value = draw.choice(kinds)
    text = (
        f"Let $r$ and $s$ be the (possibly complex) roots of ${polynomial([a, b, c])} = 0$. "
        f"Compute ${asked}$."
    )
    return Problem(text, latex(value))


@family("intermediate algebra")
def remainder(draw: Draw) -> Problem:
    coefficients = [draw.randint(1, 4), *(draw.randint(-9, 9) for _ in range(3))]
    root = draw.choice([-3, -2, -1, 1, 2, 3])
    value = 0
    for coefficient in coefficients:
        value = value * root + coefficient
    text = f"Find the remainder when ${polynomial(coefficients)}$ is divided by ${polynomial([1, -root])}$."
    return Problem(text, latex(value))


@family("intermediate algebra")
def composed(draw: Draw) -> Problem:
    a, b = nonzero(draw, 5), nonzero(draw, 9)
    c, d, e = nonzero(draw, 3), nonzero(draw, 5), nonzero(draw, 9)
    x = draw.randint(-4, 4)
    inner = c * x * x + d * x + e
    functions = f"Let $f(x) = {polynomial([a, b])}$ and $g(x) = {polynomial([c, d, e])}$."
    text = f"{functions} What is $f(g({x})) - g({x})$?"
    return Problem(text, latex(a * inner + b - inner))


@family("intermediate algebra", held_out=True)
def third_power(draw: Draw) -> Problem:
    total = nonzero(draw, 6)
    product = nonzero(draw, 6)
    text = f"If $x + y = {total}$ and $xy = {product}$, what is $x^3 + y^3$?"
    return Problem(text, latex(total**3 - 3 * product * total))


@family("precalculus")
def arithmetic_sum(draw: Draw) -> Problem:
    first, difference, count = draw.randint(-9, 20), nonzero(draw, 9), draw.randint(8, 40)
    terms = ", ".join(str(first + k * difference) for k in range(3))
    text = f"What is the sum of the first {count} terms of the arithmetic sequence ${terms}, \\ldots$?"
    return Problem(text, latex(count * (2 * first + (count - 1) * difference) // 2))


@family("precalculus")
def geometric_series(draw: Draw) -> Problem:
    first = draw.randint(1, 12)
    denominator = draw.randint(2, 7)
    ratio = Fraction(nonzero(draw, denominator - 1), denominator)
    text = (
        f"Compute the sum of the infinite geometric series with first term ${first}$ and common ratio "
        f"${latex(ratio)}$."
    )
    return Problem(text, latex(first / (1 - ratio)))


@family("precalculus")
def logarithm(draw: Draw) -> Problem:
    base = draw.choice([2, 3, 5])
    p, q, r = draw.randint(1, 6), draw.randint(1, 5), draw.randint(1, 4)
    text = f"Evaluate $\\log_{{{base**r}}} {base**p} + \\log_{{{base}}} {base**q}$."
    return Problem(text, latex(Fraction(p, r) + q))


@family("precalculus", held_out=True)
def dot_and_length(draw: Draw) -> Problem:
    u, v = ([draw.randint(-6, 6) for _ in range(3)] for _ in range(2))
    k = draw.randint(2, 4)
    dot = sum(a * b for a, b in zip(u, v, strict=True))
    square = sum(a * a for a in u)
    text = (
        f"Let $\\mathbf{{u}} = ({', '.join(map(str, u))})$ and $\\mathbf{{v}} = ({', '.join(map(str, v))})$. "
        f"Compute $\\mathbf{{u}} \\cdot ({k}\\mathbf{{v}} - \\mathbf{{u}})$."
    )
    return Problem(text, latex(k * dot - square))
