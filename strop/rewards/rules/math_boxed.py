"""MATH: the boxed answer, compared by value.

verl compares texts after LaTeX normalisation (Hendrycks et al. 2021), here `normalise`.
"""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.rules.extract import FRAMED, last_box
from strop.rewards.rules.maths import equality

_DROPPED = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%")
_TEXT = "\\text{ "


def extract_answer(solution_str: str, *, compat: Literal["verl"] | None = None) -> str | None:
    """Return the content of the last box."""
    box = last_box(solution_str, compat=compat)
    if box is None or (compat == "verl" and box.whole.startswith(FRAMED)):
        return None
    return box.content


def normalise(answer: str) -> str:
    """Return verl's one spelling for LaTeX that can be written in many ways.

    Drops line breaks, \\!, \\left and \\right, degrees, dollar and percent signs, everything after the first
    `\\text{ ` (so 9\\text{ or }8 is 9), a short left-hand side (`x=`) and spaces; writes tfrac and dfrac as
    frac, .5 as 0.5, \\sqrt3 as \\sqrt{3}, \\frac12 and 1/2 as \\frac{1}{2}, and 0.5 as \\frac{1}{2}.
    """
    text = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for piece in _DROPPED:
        text = text.replace(piece, "")
    text = text.partition(_TEXT)[0]
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])(?=\{)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac([^{])(.)", r"\\frac{\1}{\2}", text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", text)


def equal(answer: str, truth: str, *, compat: Literal["verl"] | None = None) -> bool:
    """Whether the answer is the reference, in value; with `compat="verl"`, in text after normalisation."""
    if compat != "verl":
        return equality.equal(answer, truth)
    if max(answer.count(_TEXT), truth.count(_TEXT)) > 1:  # verl cannot find the unit and compares raw texts
        return answer == truth
    return normalise(answer) == normalise(truth)


def compute_score(solution_str: str, ground_truth: object, *, compat: Literal["verl"] | None = None) -> float:
    """Return 1 if the last box holds the answer, else 0.

    Answers are compared by value: fractions, decimals, roots, powers, units, sets, intervals, equations.
    `compat="verl"` compares normalised texts, and `\\fbox` does not count.
    """
    answer = extract_answer(solution_str, compat=compat)
    return float(answer is not None and equal(answer, str(ground_truth), compat=compat))
