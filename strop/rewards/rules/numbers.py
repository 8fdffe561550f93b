"""Plain decimal numbers in text."""

from __future__ import annotations

import re
from decimal import Decimal

# Thousands are grouped by three, so that "1,000" is a number and the list "1,2" is not.
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+]?\.[0-9]+")


def to_number(text: str) -> Decimal | None:
    """The value of a plain number: thousands separators, a currency sign and a final full stop do not count.

    >>> to_number("$1,200.50.") == to_number("1200.5")
    True
    >>> to_number("1,2") is None
    True
    """
    plain = text.strip().removeprefix("$").removesuffix(".")
    return Decimal(plain.replace(",", "")) if NUMBER.fullmatch(plain) else None


def same_number(left: str, right: str) -> bool:
    """Whether both are plain numbers of the same value: 18, 18.00 and 18. are."""
    value = to_number(left)
    return value is not None and value == to_number(right)
