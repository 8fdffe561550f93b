"""Find answers in text, in linear time: the last \\boxed{...}, and plain decimal numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal, NamedTuple

BOXED = "\\boxed"
FRAMED = "\\fbox"

# Thousands are grouped by three, so that "1,000" is a number and the list "1,2" is not.
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+]?\.[0-9]+")


class Box(NamedTuple):
    """A LaTeX box: the whole command, and its content."""

    whole: str
    content: str


def last_box(text: str, *, compat: Literal["verl"] | None = None) -> Box | None:
    """Return the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, or `\\boxed ...` up to a `$`.

    A box that is never closed (the response was truncated) does not count. `compat="verl"` prefers the form
    with a space wherever it is, and looks for fbox only if there is no boxed.
    """
    if compat == "verl":
        start = text.rfind(BOXED + " ")
        if start >= 0:
            return _spaced_box(text, start, BOXED)
        start = text.rfind(BOXED)
        if start < 0:
            start = text.rfind(FRAMED)
    else:
        start = max(text.rfind(BOXED), text.rfind(FRAMED))
    if start < 0:
        return None
    command = FRAMED
    if text.startswith(BOXED, start):
        command = BOXED
    argument = text[start + len(command) :].lstrip()
    if not argument.startswith("{"):
        return _spaced_box(text, start, command)
    opening = len(text) - len(argument)
    closing = closing_brace(text, opening)
    if closing < 0:
        return None
    return Box(text[start : closing + 1], text[opening + 1 : closing])


def _spaced_box(text: str, start: int, command: str) -> Box | None:
    """Return the box `\\boxed ...` that ends at a dollar sign or at the end of the text."""
    end = start + len(command)
    if not text[end : end + 1].isspace():
        return None
    whole = text[start:].partition("$")[0]
    return Box(whole, whole[len(command) :].strip())


def closing_brace(text: str, opening: int) -> int:
    """Return the position of the brace that closes the one at `opening`, or -1."""
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return -1


def to_number(text: str) -> Decimal | None:
    """Return the value of a plain number; thousands separators, a dollar sign and a final full stop are
    ignored.

    >>> to_number("$1,200.50.") == to_number("1200.5")
    True
    >>> to_number("1,2") is None
    True
    """
    plain = text.strip().removeprefix("$").removesuffix(".")
    if not NUMBER.fullmatch(plain):
        return None
    return Decimal(plain.replace(",", ""))
