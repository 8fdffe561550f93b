"""Multiple choice: which letter the response settles on."""

from __future__ import annotations

import re
from typing import Any

from strop.rewards.rules.boxed import last_box
from strop.rewards.rules.search_qa import extract_answer as last_answer_tag

TAIL = 300
LETTERS = "ABCDEFGHIJ"
_STATED = re.compile(r"(?i:answer|choice|option)(?i:\s{0,5}(?:is|:)|)[\s*(\[\"'$]{0,10}([A-Z])(?![A-Za-z'])")
_ALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])(?:[).:]|(?=\s*$))")


def extract_choice(solution_str: str, *, letters: str = LETTERS) -> str | None:
    """The letter in the last box or <answer>; else the last one stated ("the answer is C"); else the last that stands alone."""
    box = last_box(solution_str)
    for enclosed in (box.content if box else None, last_answer_tag(solution_str)):
        found = _only_letter(enclosed, letters) if enclosed is not None else None
        if found:
            return found
    tail = solution_str[-TAIL:]
    for pattern in (_STATED, _ALONE):
        stated = [letter for letter in pattern.findall(tail) if letter in letters]
        if stated:
            return stated[-1]
    return None


def compute_score(solution_str: str, ground_truth: Any, *, letters: str = LETTERS, format_score: float = 0.0) -> float:
    """1 for the right letter, `format_score` for another, 0 for none. The truth is a letter or its number from 0."""
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool):
        if not 0 <= ground_truth < len(letters):
            raise ValueError(f"The ground truth {ground_truth} is no number of a choice among {letters!r} (counted from 0).")
        truth: str | None = letters[ground_truth]
    else:
        truth = _only_letter(str(ground_truth), letters)
    if truth is None:
        raise ValueError(f"The ground truth {ground_truth!r} names no choice; give one letter of {letters!r} or its number.")
    choice = extract_choice(solution_str, letters=letters)
    return 0.0 if choice is None else 1.0 if choice == truth else format_score


def _only_letter(text: str, letters: str) -> str | None:
    """The letter of `B`, `(B)`, `B.`, `\\text{B}` or `B) because ...`."""
    bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\b|[{}$*\\]", "", text).strip().lstrip("([\"' ")
    if not bare or bare[0].upper() not in letters:
        return None
    ends = len(bare) == 1 or not (bare[1].isalnum() or bare[1] in "' ")
    return bare[0].upper() if ends else None
