"""GSM8K: the number after four hashes, or the last number of the text."""

from __future__ import annotations

import re
from typing import Any, Literal

from strop.rewards.rules.numbers import NUMBER, same_number

TAIL = 300  # characters: the answer stands at the end, and a regex over a whole chain of thought is slow
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_VERL_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_answer(solution_str: str, *, method: str = "strict", compat: Literal["verl"] | None = None) -> str | None:
    """`strict`: the number after the last `#### `. `flexible`: the last number. None if there is none."""
    tail = solution_str[-TAIL:]
    if method == "strict":
        marked = _MARKED.findall(tail)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    if method != "flexible":
        raise ValueError(f"gsm8k extracts by method 'strict' or 'flexible', not {method!r}.")
    if compat == "verl":
        found = _VERL_NUMBER.findall(tail)
        return next((number for number in reversed(found) if number != "."), found[0] if found else None)
    return next(iter(NUMBER.findall(tail)[::-1]), None)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    method: str = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
    compat: Literal["verl"] | None = None,
) -> float:
    """`score` for the right number, `format_score` for another number, 0 for none.

    Numbers are compared by value: 42, 42. and 42.00 are the same, so are 1,234 and 1234. `compat="verl"` compares strings.
    """
    answer, truth = extract_answer(solution_str, method=method, compat=compat), str(ground_truth)
    if answer is None:
        return 0.0
    right = answer == truth or (compat != "verl" and same_number(answer, truth))
    return score if right else format_score
