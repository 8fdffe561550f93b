"""Mathematical equality of answers, by math-verify and sympy.

Simplifying an expression may take for ever, so this scorer is declared slow: the dispatcher runs it in a worker process with a
time limit. math-verify's own limits are switched off, for they rest on signals, which fail outside the main thread.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from strop.extras import require
from strop.rewards.rules import math_boxed
from strop.rewards.rules.boxed import last_box
from strop.rewards.rules.numbers import to_number

TAIL = 2000
_STATED = re.compile(r"(?i)answer\s{0,5}(?:is|:)\s{0,5}([^\n]{1,200})")


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """{score: 1 or 0, acc, pred, match}: `match` is "exact", "approximate" (a decimal or a percentage of it) or "none"."""
    pred, truth = extract_answer(solution_str), str(ground_truth)
    match = "none"
    if pred is not None:
        source = f"\\boxed{{{pred}}}" if last_box(solution_str) else solution_str[-TAIL:]
        match = compare(pred, truth, source=source)
    return {"score": float(match != "none"), "acc": match != "none", "pred": pred or "", "match": match}


def extract_answer(solution_str: str) -> str | None:
    """The last box; else what follows the last "answer is"; else the end of the text, for math-verify to search."""
    box = last_box(solution_str)
    if box is not None:
        return box.content
    stated = _STATED.findall(solution_str[-TAIL:])
    if stated:
        return stated[-1].strip().rstrip(".")
    return solution_str[-TAIL:].strip() or None


def compare(pred: str, truth: str, *, source: str | None = None) -> str:
    """ "exact", "approximate" or "none". `source` is the text that math-verify reads the answer from (default: pred, boxed)."""
    if math_boxed.equal(pred, truth):
        return "exact"
    gold, found = parse(f"\\boxed{{{truth}}}"), parse(source or f"\\boxed{{{pred}}}")
    if verify(gold, found):
        return "approximate" if _approximates(gold, found) else "exact"
    return "approximate" if _same_percentage(pred, truth) else "none"


def parse(text: str) -> list[Any]:
    """math-verify's reading of the answer in a text: expressions and their spelling, or nothing."""
    return _library().parse(text, parsing_timeout=None)


def verify(gold: list[Any], found: list[Any]) -> bool:
    return bool(_library().verify(gold, found, timeout_seconds=None))


def _library() -> Any:
    library = require("math_verify", extra="math", why="Comparing mathematical answers")
    for noisy in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(noisy).setLevel(logging.ERROR)  # it warns on every call that its own limits are off
    return library


def _approximates(gold: list[Any], found: list[Any]) -> bool:
    """A decimal on one side and an irrational number on the other."""
    expressions = [side[0] for side in (gold, found) if side and not isinstance(side[0], str)]
    floats = any(getattr(e, "is_Float", False) for e in expressions)
    return floats and any(getattr(e, "is_irrational", False) for e in expressions)


def _same_percentage(pred: str, truth: str) -> bool:
    """50\\% and 0.5: equal once percentages are divided by a hundred."""
    values = []
    for text in (pred, truth):
        bare = text.replace("\\%", "%").strip().strip("$")
        value = to_number(bare.removesuffix("%"))
        values.append(value / 100 if value is not None and bare.endswith("%") else value)
    return values[0] is not None and values[0] == values[1]
