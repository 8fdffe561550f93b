"""Whether what a program wrote or returned is what a test expects.

An expected integer must be given exactly, or as a number with a fraction that is at most 1e-5 away. Numbers
that are expected with a fraction have a relative tolerance, as in verl. Nothing here raises, whatever the
program gave.
"""

from __future__ import annotations

import math
import re

RELATIVE_TOLERANCE = 1e-5
ABSOLUTE_TOLERANCE = 1e-8
_MAX_FLOAT_DIGITS = 310  # of an integer that a float can be equal to, with its sign
_EXACT = 1 << 53  # floats from here on have no fraction
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


def same_output(written: str, expected: str) -> bool:
    """Whether two outputs are equal line by line, without outer white space, and number by number.

    >>> same_output("1.0000001  2\\n\\n", "1 2")
    True
    """
    written_lines = written.strip().splitlines()
    expected_lines = expected.strip().splitlines()
    if len(written_lines) != len(expected_lines):
        return False
    return all(map(_same_line, written_lines, expected_lines))


def _same_line(written: str, expected: str) -> bool:
    written_words = written.split()
    expected_words = expected.split()
    if len(written_words) != len(expected_words):
        return False
    return all(map(_same_word, written_words, expected_words))


def _same_word(written: str, expected: str) -> bool:
    if written == expected:
        return True
    written_integer = _integer_text(written)
    expected_integer = _integer_text(expected)
    if written_integer is not None and expected_integer is not None:
        return written_integer == expected_integer  # as text: integers of any length
    try:
        number = float(written)
        expected_number = float(expected)
    except ValueError:
        return False
    if expected_integer is None:
        if _overflows(number, written) or _overflows(expected_number, expected):
            return False
        return _same_float(number, expected_number)
    if len(expected_integer) > _MAX_FLOAT_DIGITS:  # beyond every float
        return False
    return _is_integer(number, int(expected_integer))


def _overflows(number: float, word: str) -> bool:
    """Whether the word is a number that is too large for a float, and not infinity itself."""
    return math.isinf(number) and "inf" not in word.lower()


def _integer_text(word: str) -> str | None:
    """Return the digits of an integer without leading zeros, with a minus if it is negative."""
    match = _INTEGER.fullmatch(word)
    if match is None:
        return None
    sign, digits = match.groups()
    if sign == "-" and digits != "0":
        return f"-{digits}"
    return str(digits)


def same_value(value: object, expected: object) -> bool:
    """Whether two values are equal, with numbers compared as in `same_output`; tuples are lists, as in
    JSON."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_number(value, expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        by_text = {str(key): item for key, item in expected.items()}
        return set(value) == set(by_text) and all(same_value(value[key], by_text[key]) for key in value)
    return value == expected


def _same_number(value: float, expected: float) -> bool:
    if isinstance(expected, int):
        if isinstance(value, int):
            return value == expected
        return _is_integer(value, expected)
    try:
        return _same_float(float(value), expected)
    except OverflowError:  # an integer beyond every float
        return False


def _is_integer(number: float, expected: int) -> bool:
    """Whether a float is this integer, but for a rounding error that leaves it a fraction."""
    if not math.isfinite(number):
        return False
    if number.is_integer():
        return int(number) == expected
    if abs(expected) > _EXACT:  # then the number, which has a fraction, is not near
        return False
    tolerance = min(RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(expected))
    return abs(number - expected) <= tolerance


def _same_float(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
