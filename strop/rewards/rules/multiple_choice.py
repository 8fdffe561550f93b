"""Multiple choice: the letter that the response chooses."""

from __future__ import annotations

import re

from strop.rewards.rules.extract import last_box
from strop.rewards.rules.search_qa import extract_answer as last_answer_tag

TAIL = 300
LETTERS = "ABCDEFGHIJ"
_STATED = re.compile(r"(?i:answer|choice|option)(?i:\s{0,5}(?:is|:)|)[\s*(\[\"'$]{0,10}([A-Z])(?![A-Za-z'])")
_ALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])(?:[).:]|(?=\s*$))")


def extract_choice(solution_str: str, *, letters: str = LETTERS) -> str | None:
    """Return the letter in the last box or <answer> tag, else the last stated one, else the last that stands
    alone.

    A stated letter is one as in "the answer is C".
    """
    box = last_box(solution_str)
    if box is not None:
        letter = _only_letter(box.content, letters)
        if letter:
            return letter
    tagged = last_answer_tag(solution_str)
    if tagged is not None:
        letter = _only_letter(tagged, letters)
        if letter:
            return letter
    tail = solution_str[-TAIL:]
    for pattern in (_STATED, _ALONE):
        stated: list[str] = [letter for letter in pattern.findall(tail) if letter in letters]
        if stated:
            return stated[-1]
    return None


def compute_score(
    solution_str: str, ground_truth: object, *, letters: str = LETTERS, format_score: float = 0.0
) -> float:
    """Return 1 for the right letter, `format_score` for another one, 0 if there is none.

    The ground truth is a letter, or the index of a letter, counted from 0.
    """
    truth = _true_letter(ground_truth, letters)
    choice = extract_choice(solution_str, letters=letters)
    if choice is None:
        return 0.0
    if choice == truth:
        return 1.0
    return format_score


def _true_letter(ground_truth: object, letters: str) -> str:
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool):
        if not 0 <= ground_truth < len(letters):
            raise ValueError(
                f"The ground truth {ground_truth} is no number of a choice among {letters!r} (counted from "
                "0)."
            )
        return letters[ground_truth]
    letter = _only_letter(str(ground_truth), letters)
    if letter is None:
        raise ValueError(
            f"The ground truth {ground_truth!r} names no choice; give one letter of {letters!r} or its "
            "number."
        )
    return letter


def _only_letter(text: str, letters: str) -> str | None:
    """Return the letter of `B`, `(B)`, `B.`, `\\text{B}` or `B) because ...`."""
    bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\b|[{}$*\\]", "", text).strip().lstrip("([\"' ")
    if not bare or bare[0].upper() not in letters:
        return None
    if len(bare) > 1 and (bare[1].isalnum() or bare[1] in "' "):
        return None
    return bare[0].upper()
