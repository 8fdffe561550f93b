"""DAPO's maths scorer: the line after "Answer:", or a box, compared after Minerva's normalisation (Lewkowycz et al. 2022)."""

from __future__ import annotations

import re
from typing import Any, Literal

from strop.rewards.rules import math_boxed
from strop.rewards.rules.boxed import BOXED, last_box

INVALID = "[INVALID]"
TAIL, VERL_BOX_TAIL = 300, 100
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
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *(
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
        "\\text{}",
    ),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
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
    """Minerva's spelling: the right-hand side, without units, articles, spaces, text wrappers and thousands separators."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for unit in _REMOVED:
        text = text.replace(unit, "")
    opening, closing = text.find("$"), text.find("$", text.find("$") + 1)
    if 0 <= opening < closing:
        text = text[opening : closing + 1]
    for pattern, inside in _WRAPPERS:
        text = pattern.sub(inside, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return digits.strip() if digits.isdigit() else text.strip()


def compute_score(
    solution_str: str, ground_truth: Any, *, strict_box_verify: bool = False, compat: Literal["verl"] | None = None
) -> dict[str, Any]:
    """{score: 1 or -1, acc: bool, pred: str}, from the last "Answer:" line or else the last box of the final 300 characters.

    `strict_box_verify` looks at the box only. The box is normalised like the line, and answers that agree after either
    normalisation (Minerva's or MATH's) agree. `compat="verl"` compares a box raw, and within the last 100 characters only.
    """
    tail, truth = solution_str[-TAIL:], str(ground_truth)
    lines = [] if strict_box_verify else _ANSWER.findall(tail)
    pred: str | None
    if lines:
        pred = normalise(lines[-1])
        right = pred == normalise(truth) or (compat != "verl" and math_boxed.equal(pred, truth))
    elif compat == "verl":
        pred = _verl_box(tail[-VERL_BOX_TAIL:])
        right = pred == truth
        pred = INVALID if pred is None and not strict_box_verify else pred
    else:
        box = last_box(tail)
        pred = INVALID if box is None else normalise(box.content)
        right = box is not None and (pred == normalise(truth) or math_boxed.equal(box.content, truth))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _verl_box(text: str) -> str | None:
    start = text.rfind(BOXED + "{")
    box = last_box(text[start:]) if start >= 0 else None
    return None if box is None else box.content
