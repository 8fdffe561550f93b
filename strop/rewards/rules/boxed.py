"""The last \\boxed{...} of a text, found in linear time."""

from __future__ import annotations

from typing import Literal, NamedTuple

BOXED, FRAMED = "\\boxed", "\\fbox"


class Box(NamedTuple):
    whole: str
    content: str


def last_box(text: str, *, compat: Literal["verl"] | None = None) -> Box | None:
    """The last box: `\\boxed{...}` or `\\fbox{...}` with balanced braces, or `\\boxed ...` up to a dollar sign.

    A box that is never closed (the response was cut) is no box. `compat="verl"` prefers the form with a space wherever it
    stands, and looks for fbox only where there is no boxed.
    """
    if compat == "verl":
        spaced = text.rfind(BOXED + " ")
        start = spaced if spaced >= 0 else text.rfind(BOXED)
        if start < 0:
            start = text.rfind(FRAMED)
    else:
        spaced = -1
        start = max(text.rfind(BOXED), text.rfind(FRAMED))
    if start < 0:
        return None
    command = BOXED if text.startswith(BOXED, start) else FRAMED
    after = start + len(command)
    inside = text[after:].lstrip() if spaced < 0 else ""
    if inside.startswith("{"):
        opening = len(text) - len(inside)
        closing = closing_brace(text, opening)
        return None if closing < 0 else Box(text[start : closing + 1], text[opening + 1 : closing])
    if text[after : after + 1].isspace():
        whole = text[start:].partition("$")[0]
        return Box(whole, whole[len(command) :].strip())
    return None


def closing_brace(text: str, opening: int) -> int:
    """Where the brace that opens at `opening` closes, or -1."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return -1
