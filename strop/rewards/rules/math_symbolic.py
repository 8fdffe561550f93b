"""Mathematical equality of answers, boxed or stated; with `compat="verl"`, as math-verify and sympy see it.

To simplify an expression with sympy may take forever, so this scorer is declared slow: it runs in a worker
process with a timeout. math-verify's timeouts are disabled, because they use signals, which work in the main
thread only.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from types import ModuleType
from typing import Literal

from strop.extras import require
from strop.rewards.rules import math_boxed
from strop.rewards.rules.extract import last_box, to_number
from strop.rewards.rules.gsm8k import extract_answer as last_number
from strop.rewards.rules.maths import equality

TAIL = 2000
_STATED = re.compile(r"(?i)answer\s{0,5}(?:is\s{0,5}:?|:)\s{0,5}([^\n]{1,200})")
_MATH = re.compile(r"\$([^$\n]{1,300})\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)

_LISTED = re.compile(r"[\s,;/]*(?:or|and)?\s*")
"""Between formulas that are answers side by side."""


def compute_score(
    solution_str: str, ground_truth: object, *, compat: Literal["verl"] | None = None
) -> dict[str, object]:
    """Return {score: 1 or 0, acc, pred, match}.

    `match` is "exact", "approximate" (a decimal of an irrational number) or "none". `compat="verl"` compares
    with math-verify.
    """
    pred = extract_answer(solution_str)
    match = "none"
    if pred is not None and compat == "verl":
        source = solution_str[-TAIL:]
        if last_box(solution_str):
            source = f"\\boxed{{{pred}}}"
        match = compare(pred, str(ground_truth), source=source, compat=compat)
    elif pred is not None:
        match = _best_match(solution_str, pred, str(ground_truth))
    return {"score": float(match != "none"), "acc": match != "none", "pred": pred or "", "match": match}


def extract_answer(solution_str: str) -> str | None:
    """Return the last box, else the text after the last "answer is", else the end of the text."""
    box = last_box(solution_str)
    if box is not None:
        return box.content
    stated = _STATED.findall(solution_str[-TAIL:])
    if stated:
        return stated[-1].strip().rstrip(".")
    return solution_str[-TAIL:].strip() or None


def _best_match(solution_str: str, pred: str, truth: str) -> str:
    """Compare the answer; without a box, the first formula of a statement; without a statement, the last
    formula or the last number."""
    match = compare(pred, truth)
    if match != "none" or last_box(solution_str) is not None:
        return match
    stated = _STATED.search(solution_str[-TAIL:])
    formulas = list(_MATH.finditer(pred))
    if formulas:
        if stated and len(formulas) > 1 and _LISTED.fullmatch(pred[formulas[0].end() : formulas[1].start()]):
            return match
        chosen = formulas[0 if stated else -1]
        return compare(next(filter(None, chosen.groups())), truth)
    if stated:
        return match
    number = last_number(pred, method="flexible")
    if number is None:
        return "none"
    return compare(number, truth)


def compare(
    pred: str, truth: str, *, source: str | None = None, compat: Literal["verl"] | None = None
) -> str:
    """Return "exact", "approximate" or "none".

    With `compat="verl"`, math-verify parses the answer from `source` (default: boxed pred).
    """
    if compat != "verl":
        return equality.compare(pred, truth)
    if math_boxed.equal(pred, truth, compat=compat):
        return "exact"
    gold = parse(f"\\boxed{{{truth}}}")
    answer = parse(source or f"\\boxed{{{pred}}}")
    if verify(gold, answer):
        if _approximates(gold, answer):
            return "approximate"
        return "exact"
    if _same_percentage(pred, truth):
        return "approximate"
    return "none"


def parse(text: str) -> list[object]:
    """Return the expressions that math-verify finds in a text, and their spelling."""
    expressions: list[object] = _library().parse(text, parsing_timeout=None)
    return expressions


def verify(gold: list[object], answer: list[object]) -> bool:
    """Whether math-verify finds the two parsed answers equal."""
    return bool(_library().verify(gold, answer, timeout_seconds=None))


def _library() -> ModuleType:
    library = require("math_verify", extra="math", why="Comparing mathematical answers")
    for noisy in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(noisy).setLevel(logging.ERROR)  # it warns on every call that timeouts are off
    return library


def _approximates(gold: list[object], answer: list[object]) -> bool:
    """Whether one side is a decimal and the other an irrational number."""
    has_float = False
    has_irrational = False
    for side in (gold, answer):
        if side and not isinstance(side[0], str):
            has_float = has_float or bool(getattr(side[0], "is_Float", False))
            has_irrational = has_irrational or bool(getattr(side[0], "is_irrational", False))
    return has_float and has_irrational


def _same_percentage(pred: str, truth: str) -> bool:
    """Whether both are equal after percentages are divided by 100, as 50\\% and 0.5."""
    value = _percentage_value(pred)
    return value is not None and value == _percentage_value(truth)


def _percentage_value(text: str) -> Decimal | None:
    bare = text.replace("\\%", "%").strip().strip("$")
    value = to_number(bare.removesuffix("%"))
    if value is not None and bare.endswith("%"):
        return value / 100
    return value
