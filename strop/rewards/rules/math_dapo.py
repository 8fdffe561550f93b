"""DAPO's maths scorer: the "Answer:" line or a box, with Minerva's normalisation (Lewkowycz et al. 2022)."""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.rules import math_boxed
from strop.rewards.rules.extract import BOXED, last_box

INVALID = "[INVALID]"
TAIL = 300
VERL_BOX_TAIL = 100
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED_WORDS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots"),
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters"),
    *("meals", "edges", "students", "childrentickets", "multiples"),
)
_REMOVED = (
    *_REMOVED_WORDS,
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_WRAPPERS = (
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalise(answer: str) -> str:
    """Return the right-hand side without units, articles, spaces, text wrappers and thousands separators."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for unit in _REMOVED:
        text = text.replace(unit, "")
    opening = text.find("$")
    closing = text.find("$", opening + 1)
    if 0 <= opening < closing:
        text = text[opening : closing + 1]
    for pattern, inside in _WRAPPERS:
        text = pattern.sub(inside, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    if digits.isdigit():
        return digits.strip()
    return text.strip()


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    strict_box_verify: bool = False,
    compat: Literal["verl"] | None = None,
) -> dict[str, object]:
    """Return {score: 1 or -1, acc: bool, pred: str} of the last "Answer:" line, else of the last box.

    Only the last 300 characters are searched. `strict_box_verify` reads the box only. The box is normalised
    like the line; answers that are equal after either normalisation (Minerva's or MATH's) are equal.
    `compat="verl"` compares a box without normalisation, and within the last 100 characters only.
    """
    tail = solution_str[-TAIL:]
    truth = str(ground_truth)
    lines: list[str] = []
    if not strict_box_verify:
        lines = _ANSWER.findall(tail)
    pred: str | None
    if lines:
        pred = normalise(lines[-1])
        right = pred == normalise(truth) or (compat != "verl" and math_boxed.equal(pred, truth))
    elif compat == "verl":
        pred = _verl_box(tail[-VERL_BOX_TAIL:])
        right = pred == truth
        if pred is None and not strict_box_verify:
            pred = INVALID
    else:
        box = last_box(tail)
        if box is None:
            pred = INVALID
            right = False
        else:
            pred = normalise(box.content)
            right = pred == normalise(truth) or math_boxed.equal(box.content, truth)
    score = -1.0
    if right:
        score = 1.0
    return {"score": score, "acc": right, "pred": pred}


def _verl_box(text: str) -> str | None:
    start = text.rfind(BOXED + "{")
    if start < 0:
        return None
    box = last_box(text[start:])
    if box is None:
        return None
    return box.content
