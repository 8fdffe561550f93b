"""DAPO's maths scorer: the "Answer:" line or a box, compared by value.

verl compares texts after Minerva's normalisation (Lewkowycz et al. 2022), here `normalise`.
"""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.rules.extract import BOXED, closing_brace, last_box
from strop.rewards.rules.maths import equality

INVALID = "[INVALID]"
TAIL = 300
VERL_BOX_TAIL = 100
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")

_CLOSING_WORDS = re.compile(r"(?i)[.\s]{0,9}I hope (?:it|this) is correct[.!\s]*$|</answer>\s*$")
"""Minerva's prompt lets a model end with "The final answer is $5$. I hope it is correct."."""

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

    Only the last 300 characters are searched. `strict_box_verify` reads the box only. Answers are compared by
    value; `pred` has one spelling for equal numbers. `compat="verl"` compares the line after Minerva's
    normalisation, and a box without any, within the last 100 characters.
    """
    tail = solution_str[-TAIL:]
    truth = str(ground_truth)
    if compat == "verl":
        return _score_as_verl(tail, truth, strict_box_verify)
    answer = _answer_line(tail, strict_box_verify)
    if answer is None:
        box = last_box(tail)
        if box is None:
            return _result(False, INVALID)
        answer = box.content
    return _result(equality.equal(answer, truth), equality.canonical(answer))


def _answer_line(tail: str, strict_box_verify: bool) -> str | None:
    """Return what the last "Answer:" line says, without a box around it."""
    lines: list[str] = []
    if not strict_box_verify:
        lines = _ANSWER.findall(tail.replace("：", ":"))
    if not lines or not lines[-1].strip(" $\\[*_"):  # a formula below begins with $$ or \[
        return None
    line = _CLOSING_WORDS.sub("", lines[-1]).strip(" *_")
    box = last_box(line)
    if box is not None and line.replace(box.whole, "", 1).strip(" $.*\\()[]") == "":
        return box.content
    return line


def _score_as_verl(tail: str, truth: str, strict_box_verify: bool) -> dict[str, object]:
    lines: list[str] = []
    if not strict_box_verify:
        lines = _ANSWER.findall(tail)
    if lines:
        normal = normalise(lines[-1])
        return _result(normal == normalise(truth), normal)
    pred = _verl_box(tail[-VERL_BOX_TAIL:])
    if pred is None and not strict_box_verify:
        return _result(False, INVALID)
    return _result(pred == truth, pred)


def _result(right: bool, pred: str | None) -> dict[str, object]:
    score = -1.0
    if right:
        score = 1.0
    return {"score": score, "acc": right, "pred": pred}


def _verl_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{`, whatever stands behind it."""
    start = text.rfind(BOXED + "{")
    if start < 0:
        return None
    opening = start + len(BOXED)
    closing = closing_brace(text, opening)
    if closing < 0:
        return None
    return text[opening + 1 : closing]
