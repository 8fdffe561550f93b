"""Families of problems about whole numbers, counting and probability."""

from __future__ import annotations

import math
from fractions import Fraction

from problem import Draw, Problem, family, latex

FRACTION = "Give your answer as a common fraction or a whole number."
WORDS = (
    "LEVEL", "BANANA", "COFFEE", "LETTER", "PEPPER", "SCHOOL", "SUCCESS", "ARRANGE", "BALLOON", "COMMITTEE",
    "POTATO", "ALGEBRA", "GEOMETRY", "PARALLEL", "STATISTICS", "ADDITION", "TRIANGLE", "NUMBER", "CIRCLE",
)  # fmt: skip


@family("number theory")
def last_digits(draw: Draw) -> Problem:
    base, power, modulus = draw.randint(2, 30), draw.randint(10, 200), draw.choice([5, 7, 9, 10, 11, 13])
    text = f"What is the remainder when ${base}^{{{power}}}$ is divided by ${modulus}$?"
    return Problem(text, latex(pow(base, power, modulus)))


@family("number theory")
def divisors(draw: Draw) -> Problem:
    number = math.prod(p ** draw.randint(0, most) for p, most in ((2, 4), (3, 3), (5, 2), (7, 1), (11, 1)))
    kind = draw.choice(["positive divisors", "positive odd divisors"])
    odd = "odd" in kind
    count = sum(number % k == 0 and (k % 2 == 1 or not odd) for k in range(1, number + 1))
    return Problem(f"How many {kind} does ${number}$ have?", latex(count))


@family("number theory")
def in_base(draw: Draw) -> Problem:
    base, other = draw.sample(range(3, 10), 2)
    a, b = draw.randint(20, 300), draw.randint(20, 300)
    text = (
        f"Compute ${_digits(a, base)}_{{{base}}} + {_digits(b, other)}_{{{other}}}$ and write the result in "
        "base 10."
    )
    return Problem(text, latex(a + b))


def _digits(number: int, base: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, base)
        text = f"{digit}{text}"
    return text


@family("number theory", held_out=True)
def two_remainders(draw: Draw) -> Problem:
    m, n = draw.choice([(3, 5), (4, 7), (5, 7), (5, 8), (7, 9), (8, 11), (9, 11)])
    a, b = draw.randrange(m), draw.randrange(1, n)
    least = next(k for k in range(1, m * n + 1) if k % m == a and k % n == b)
    text = (
        f"What is the smallest positive integer that leaves a remainder of {a} when divided by {m} and a "
        f"remainder of {b} when divided by {n}?"
    )
    return Problem(text, latex(least))


@family("prealgebra")
def common_multiple(draw: Draw) -> Problem:
    a, b = draw.sample(range(6, 60), 2)
    text = f"What is the sum of the greatest common divisor and the least common multiple of ${a}$ and ${b}$?"
    return Problem(text, latex(math.gcd(a, b) + math.lcm(a, b)))


@family("prealgebra")
def fractions(draw: Draw) -> Problem:
    a, b, c = (Fraction(draw.randint(1, 9), draw.randint(2, 9)) for _ in range(3))
    text = f"Simplify ${latex(a)} \\div {latex(b)} - {latex(c)}$. {FRACTION}"
    return Problem(text, latex(a / b - c))


@family("prealgebra")
def percent(draw: Draw) -> Problem:
    price = draw.randrange(20, 400, 20)
    up, down = draw.choice([5, 10, 15, 20, 25, 30]), draw.choice([5, 10, 15, 20, 25, 30])
    text = (
        f"A price of {price} dollars is raised by {up}\\%, and the new price is then lowered by {down}\\%. "
        "By how many dollars does the final price differ from the original one? Give a positive number or 0."
    )
    final = Fraction(price) * (100 + up) * (100 - down) / 10_000
    return Problem(text, latex(abs(final - price)))


@family("prealgebra", held_out=True)
def changed_mean(draw: Draw) -> Problem:
    count, mean = draw.randint(4, 12), draw.randint(60, 90)
    removed = draw.randint(2, count - 2)
    rest = draw.randint(50, 95)
    text = (
        f"The mean of {count} numbers is {mean}. When {removed} of them are removed, the mean of the others "
        f"is {rest}. What is the mean of the removed numbers?"
    )
    return Problem(text, latex(Fraction(count * mean - (count - removed) * rest, removed)))


@family("counting and probability")
def committee(draw: Draw) -> Problem:
    women, men = draw.randint(3, 8), draw.randint(3, 8)
    size = draw.randint(2, 4)
    least = draw.randint(1, size - 1)
    ways = sum(math.comb(women, k) * math.comb(men, size - k) for k in range(least, size + 1))
    text = (
        f"A club has {women} women and {men} men. In how many ways can a committee of {size} members be "
        f"chosen that has at least {least} {'woman' if least == 1 else 'women'}?"
    )
    return Problem(text, latex(ways))


@family("counting and probability")
def dice_sum(draw: Draw) -> Problem:
    sides = draw.choice([4, 6, 8, 10])
    total = draw.randint(3, 2 * sides - 1)
    hits = sum(a + b >= total for a in range(1, sides + 1) for b in range(1, sides + 1))
    text = (
        f"Two fair {sides}-sided dice with faces numbered 1 to {sides} are rolled. What is the probability "
        f"that the sum is at least {total}? {FRACTION}"
    )
    return Problem(text, latex(Fraction(hits, sides * sides)))


@family("counting and probability")
def arrangements(draw: Draw) -> Problem:
    word = draw.choice(WORDS)
    ways = math.factorial(len(word))
    for letter in set(word):
        ways //= math.factorial(word.count(letter))
    fixed = draw.randint(0, 2)
    if not fixed:
        text = f"How many distinct arrangements are there of the letters of the word {word}?"
        return Problem(text, latex(ways))
    chosen = draw.choice(sorted(set(word)))
    also = " and the last one too" if fixed == 2 else ""
    text = (
        f"The letters of the word {word} are arranged at random in a row. What is the probability that the "
        f"first letter is {chosen}{also}? {FRACTION}"
    )
    count, length = word.count(chosen), len(word)
    probability = Fraction(count, length)
    if fixed == 2:
        probability *= Fraction(count - 1, length - 1)
    return Problem(text, latex(probability))


@family("counting and probability", held_out=True)
def grid_paths(draw: Draw) -> Problem:
    right, up = draw.randint(3, 7), draw.randint(3, 6)
    x, y = draw.randint(1, right - 1), draw.randint(1, up - 1)
    ways = math.comb(x + y, x) * math.comb(right - x + up - y, right - x)
    text = (
        f"How many paths from $(0, 0)$ to $({right}, {up})$ on the integer grid pass through $({x}, {y})$, "
        "if each step goes one unit to the right or one unit up?"
    )
    return Problem(text, latex(ways))
