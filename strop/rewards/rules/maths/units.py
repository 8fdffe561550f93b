"""Units of measurement, multipliers in words, and number words."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

_PARTS = {
    **{"halves": 2, "thirds": 3, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7, "eighths": 8},
    **{"ninths": 9, "tenths": 10, "hundredths": 10**2, "thousandths": 10**3},
}
MULTIPLIERS: dict[str, int | Fraction] = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"dozen": 12, "hundreds": 10**2, "thousands": 10**3, "millions": 10**6, "billions": 10**9},
    **{"lakh": 10**5, "lakhs": 10**5, "crore": 10**7, "crores": 10**7, "万": 10**4, "亿": 10**8},
    **{name: Fraction(1, parts) for name, parts in _PARTS.items()},
}
NUMBER_WORDS = {
    **{"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8},
    **{"nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15},
    **{"sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30},
    **{"forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90},
}
NOT_UNITS = {
    *("or", "and", "to", "not", "maybe", "perhaps", "but", "times", "plus", "minus", "between", "than"),
    *("either", "if", "when", "where", "otherwise", "least", "most", "over", "from", "until"),
    *(
        "half",
        "third",
        "quarter",
        "double",
        "twice",
        "except",
        "without",
        "divided",
        "squared",
        "cubed",
        "no",
    ),
    *(
        "choose",
        "mod",
        "modulo",
        "factorial",
        "pi",
        "is",
        "are",
        "equals",
        "nor",
        "versus",
        "vs",
        "remainder",
        "分之一",
        "以上",
        "以下",
    ),
}
"""Words behind a number that change its meaning."""

Dimensions = tuple[tuple[str, int], ...]


class Unit(NamedTuple):
    """A product of powers of base units times a factor; `words` are those of a unit that is not known."""

    dimensions: Dimensions
    factor: Fraction = Fraction(1)
    words: frozenset[str] = frozenset()


PERCENT = Unit((("percent", 1),))
DEGREE = Unit((("degree", 1),))
NO_UNIT = Unit(())


def _named(base: str, factors: dict[str, str]) -> dict[str, tuple[str, int, Fraction]]:
    """Return the units of one dimension: spelling -> (base unit, power, factor)."""
    found = {}
    for spellings, factor in factors.items():
        for spelling in spellings.split():
            found[spelling] = (base, 1, Fraction(factor))
    return found


_UNITS = {
    **_named(
        "metre",
        {
            **{
                "m meter metre meters metres": "1",
                "km kilometer kilometre kilometers kilometres kms": "1000",
            },
            **{"cm centimeter centimetre centimeters centimetres cms": "1/100", "nm": "1/1000000000"},
            **{"mm millimeter millimetre millimeters millimetres": "1/1000"},
            **{"in inch inches": "127/5000", "ft foot feet": "381/1250", "yd yard yards": "1143/1250"},
            **{"mi mile miles": "201168/125"},
        },
    ),
    **_named(
        "gram",
        {
            **{"g gram grams gm gms": "1", "kg kilogram kilograms kgs": "1000"},
            **{"mg milligram milligrams": "1/1000", "ton tons tonne tonnes": "1000000"},
            **{"lb lbs pound pounds": "45359237/100000", "oz ounce ounces": "45359237/1600000"},
        },
    ),
    **_named(
        "second",
        {
            **{"s sec secs second seconds": "1", "min mins minute minutes": "60"},
            **{"h hr hrs hour hours": "3600", "day days": "86400", "week weeks": "604800", "ms": "1/1000"},
            **{"millisecond milliseconds": "1/1000"},
        },
    ),
    **_named("year", {"yr yrs year years": "1", "month months": "1/12", "decade decades": "10"}),
    **_named("dollar", {"dollar dollars usd": "1", "cent cents": "1/100"}),
    **_named("euro", {"euro euros eur": "1"}),
    **_named("sterling", {"gbp": "1"}),
    **_named("yen", {"yen jpy": "1"}),
    **_named("degree", {"degree degrees deg": "1"}),
    **_named("percent", {"percent pct": "1"}),
    **{
        spelling: ("metre", 3, Fraction(factor))
        for factor, spellings in {
            "1/1000": ("l", "liter", "liters", "litre", "litres"),
            "1/1000000": ("ml", "milliliter", "milliliters", "millilitre", "millilitres", "cc"),
        }.items()
        for spelling in spellings
    },
}
_CURRENCY_SIGNS = {"§": "dollar", "€": "euro", "£": "sterling", "¥": "yen"}
_RATES = {"mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour"), "fps": ("foot", "second")}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_IGNORED = {"a", "an", "the", "of", "unit", "units", "in", "total", "only", "each", "exactly", "whole"}
SIGNS = tuple(_CURRENCY_SIGNS)


def currency(sign: str) -> Unit:
    """Return the unit of a currency sign."""
    return Unit(((_CURRENCY_SIGNS[sign], 1),))


def parse_unit(parts: list[str]) -> Unit | None:
    """Return the unit of words, `/`, `^` and digits, as ["cm", "^", "2"]; None if they are no unit.

    >>> parse_unit(["square", "feet"]) == parse_unit(["ft", "^", "2"])
    True
    """
    dimensions: dict[str, int] = {}
    factor = Fraction(1)
    unknown = []
    sign = 1
    power = 1
    position = 0
    while position < len(parts):
        word = parts[position].lower()
        position += 1
        if word == "times" and position == len(parts):  # how many times: 3 times
            continue
        if word in NOT_UNITS or word in MULTIPLIERS or word in NUMBER_WORDS:
            return None
        if word in ("per", "/"):
            sign = -1
        elif word in _POWERS:
            power = _POWERS[word]
        elif word not in _IGNORED:
            if position + 1 < len(parts) and parts[position] == "^" and parts[position + 1].isdecimal():
                power = int(parts[position + 1][:2])
                position += 2
            if not _multiply(dimensions, word, sign * power):
                unknown.append(word)
            factor *= _factor(word) ** (sign * power)
            power = 1
    if unknown:
        return Unit((), words=frozenset(map(_singular, unknown)))
    return Unit(tuple(sorted((base, count) for base, count in dimensions.items() if count)), factor)


def same_unit(left: Unit, right: Unit) -> bool:
    """Whether quantities of the two units can be equal; a missing unit goes with every unit."""
    if left == NO_UNIT or right == NO_UNIT:
        return True
    if left.words or right.words:
        return left.words <= right.words or right.words <= left.words
    return left.dimensions == right.dimensions


def _multiply(dimensions: dict[str, int], word: str, power: int) -> bool:
    """Add the dimensions of a word; False if it is no known unit."""
    if word in _RATES:
        above, below = _RATES[word]
        return _multiply(dimensions, above, power) and _multiply(dimensions, below, -power)
    if word not in _UNITS:
        return False
    base, degree, _ = _UNITS[word]
    dimensions[base] = dimensions.get(base, 0) + degree * power
    return True


def _factor(word: str) -> Fraction:
    if word in _RATES:
        above, below = _RATES[word]
        return _factor(above) / _factor(below)
    if word in _UNITS:
        return _UNITS[word][2]
    return Fraction(1)


def _singular(word: str) -> str:
    return word.removesuffix("s")
