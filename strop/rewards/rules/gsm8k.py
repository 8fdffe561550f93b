"""GSM8K: the answer after `####`, or the last number of the text."""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.rules.extract import last_box
from strop.rewards.rules.maths import equality

TAIL = 300  # characters: the answer is at the end, and a regex over a whole chain of thought is slow
MARK = "####"
_VERL_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_VERL_NUMBER = re.compile(r"-?[0-9.,]+")
# A minus sign behind a digit, a letter or a bracket is a difference or a hyphen; thousands are in threes.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-−+])?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"(?:/[0-9]+(?![0-9.]))?"
    r"|(?:(?<![\w)\]])[-−+])?\.[0-9]+"
)
_DECORATION = " \t*_`"


def extract_answer(
    solution_str: str, *, method: str = "strict", compat: Literal["verl"] | None = None
) -> str | None:
    """Return the line behind the last `####` (`strict`) or the last number (`flexible`); None if none.

    `compat="verl"` takes the digits, commas and points that follow `#### ` (1 of `#### 1/2`).
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k extracts by method 'strict' or 'flexible', not {method!r}.")
    tail = solution_str[-TAIL:]
    if compat == "verl":
        return _extract_as_verl(tail, method)
    if method == "strict":
        return _marked_answer(tail)
    numbers: list[str] = _NUMBER.findall(tail)
    if not numbers:
        return None
    return numbers[-1].replace("−", "-").replace("$", "")


def _marked_answer(text: str) -> str | None:
    _, mark, answer = text.rpartition(MARK)
    lines = answer.lstrip(" \t").splitlines()
    if not mark or not lines:
        return None
    line = lines[0].strip(_DECORATION).removesuffix("</answer>").strip(_DECORATION)
    box = last_box(line)
    if box is not None and line.replace(box.whole, "", 1).strip(" $.") == "":
        line = box.content
    return line or None


def _extract_as_verl(tail: str, method: str) -> str | None:
    if method == "strict":
        marked = _VERL_MARKED.findall(tail)
        if not marked:
            return None
        return str(marked[-1]).replace(",", "")
    numbers: list[str] = _VERL_NUMBER.findall(tail)
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

    Answers are compared by value: 42, 42.00, $42 and 42 apples are equal, 1/2 is 0.5, and "42 or 43" is
    not 42. `compat="verl"` compares texts.
    """
    answer = extract_answer(solution_str, method=method, compat=compat)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    if answer == truth or (compat != "verl" and equality.equal(answer, truth)):
        return score
    return format_score
