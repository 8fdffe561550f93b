"""MATH: the boxed answer, compared after LaTeX normalisation (Hendrycks et al. 2021)."""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.rules.extract import FRAMED, last_box, same_number

_DROPPED = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%")
_TEXT = "\\text{ "
_UNIT_AT_END = re.compile(r"(?<=[0-9A-Za-z)}]) {0,3}\\text\{ [^{}]*\}(?:\^\{?[0-9]\}?)?\s*$")
_UNIT_AFTER_NUMBER = re.compile(r"(?<=[0-9])\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?[0-9]\}?)?$")
_WHOLE_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
_CHOICE = re.compile(r"\(([A-Za-z])\)")


def extract_answer(solution_str: str, *, compat: Literal["verl"] | None = None) -> str | None:
    """Return the content of the last box."""
    box = last_box(solution_str, compat=compat)
    if box is None or (compat == "verl" and box.whole.startswith(FRAMED)):
        return None
    return box.content


def normalise(answer: str, *, compat: Literal["verl"] | None = None) -> str:
    """Return one spelling for LaTeX that can be written in many ways.

    Drops line breaks, \\!, \\left and \\right, degrees, dollar and percent signs, a unit in `\\text{ ...}`, a
    short left-hand side (`x=`) and spaces; writes tfrac and dfrac as frac, .5 as 0.5, \\sqrt3 as \\sqrt{3},
    \\frac12 and 1/2 as \\frac{1}{2}, and 0.5 as \\frac{1}{2}. `compat="verl"` treats everything after the
    first `\\text{ ` as a unit (so 9\\text{ or }8 is 9).
    """
    text = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for piece in _DROPPED:
        text = text.replace(piece, "")
    if compat == "verl":
        text = text.partition(_TEXT)[0]
    else:
        text = _UNIT_AT_END.sub("", text)
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    if compat == "verl":
        text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    else:
        text = re.sub(r"\\sqrt([^{\[])", r"\\sqrt{\1}", text.replace(" ", ""))
    text = re.sub(r"\\frac([^{])(?=\{)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac([^{])(.)", r"\\frac{\1}{\2}", text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", text)


def equal(left: str, right: str, *, compat: Literal["verl"] | None = None) -> bool:
    """Whether two answers are equal after normalisation, or are the same number or the same choice."""
    if compat == "verl":
        if max(left.count(_TEXT), right.count(_TEXT)) > 1:  # verl cannot find the unit and compares raw texts
            return left == right
        return normalise(left, compat=compat) == normalise(right, compat=compat)
    left = _unwrap(normalise(left))
    right = _unwrap(normalise(right))
    return left == right or same_number(left, right)


def compute_score(solution_str: str, ground_truth: object, *, compat: Literal["verl"] | None = None) -> float:
    """Return 1 if the last box holds the answer, else 0.

    Beyond verl: \\fbox counts, 1,000 is 1000 and 3.0 is 3, `5 \\text{cm}` is 5, `\\text{(A)}` is A, a final
    full stop does not matter.
    """
    answer = extract_answer(solution_str, compat=compat)
    return float(answer is not None and equal(answer, str(ground_truth), compat=compat))


def _unwrap(answer: str) -> str:
    """Return the answer without a final full stop, a unit after a number, `\\text{...}` and `(...)` around
    it."""
    text = _UNIT_AFTER_NUMBER.sub("", answer.rstrip("."))
    for wrapper in (_WHOLE_TEXT, _CHOICE):
        whole = wrapper.fullmatch(text)
        if whole:
            text = whole[1]
    return text
