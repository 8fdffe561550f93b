"""GSM8K: the number after `####`, or the last number of the text."""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.rules.extract import NUMBER, same_number

TAIL = 300  # characters: the answer is at the end, and a regex over a whole chain of thought is slow
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_VERL_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_answer(
    solution_str: str, *, method: str = "strict", compat: Literal["verl"] | None = None
) -> str | None:
    """Return the number after the last `#### ` (`strict`) or the last number (`flexible`); None if none."""
    tail = solution_str[-TAIL:]
    if method == "strict":
        marked = _MARKED.findall(tail)
        if not marked:
            return None
        return marked[-1].replace(",", "").replace("$", "")
    if method != "flexible":
        raise ValueError(f"gsm8k extracts by method 'strict' or 'flexible', not {method!r}.")
    if compat == "verl":
        return _last_verl_number(tail)
    numbers: list[str] = NUMBER.findall(tail)
    if not numbers:
        return None
    return numbers[-1]


def _last_verl_number(text: str) -> str | None:
    """Return the last match that is not a lone full stop; the first match if all are."""
    numbers: list[str] = _VERL_NUMBER.findall(text)
    for number in reversed(numbers):
        if number != ".":
            return number
    if numbers:
        return numbers[0]
    return None


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    method: str = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
    compat: Literal["verl"] | None = None,
) -> float:
    """Return `score` for the right number, `format_score` for a wrong one, 0 if there is none.

    Numbers are compared by value: 42, 42. and 42.00 are equal, so are 1,234 and 1234. `compat="verl"`
    compares texts.
    """
    answer = extract_answer(solution_str, method=method, compat=compat)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    if answer == truth or (compat != "verl" and same_number(answer, truth)):
        return score
    return format_score
