"""Multiple choice: the letter that the response chooses."""

from __future__ import annotations

import re

from strop.rewards.rules.extract import last_box
from strop.rewards.rules.search_qa import extract_answer as last_answer_tag

TAIL = 300
LETTERS = "ABCDEFGHIJ"
_IS = r"(?i:\s{0,5}(?:is\s{0,5}:?|[:：]))"
_LETTER = (
    r"(?:[\s*_(\[{\"'$]|(?i:option|choice)\b|\\(?:text|textbf|mathrm|mathbf)\b){0,10}"
    r"([A-Z])(?![A-Za-z]|'[a-z])"
    r"(\s{0,3}(?:/|(?i:or)\b)\s{0,3}\(?[A-HJ-Z](?![A-Za-z']))?"
)
_STATED = re.compile(rf"(?:(?i:answer){_IS}?|(?i:choice|option){_IS}){_LETTER}")
_MENTIONED = re.compile(rf"(?i:choice|option){_LETTER}")
_ALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])[*_$\]}\"']{0,4}(?:[).:。]|(?=\s*$))()")
_SEVERAL = re.compile(r"(?:[A-Z][)\]\"']?(?:\s*[,;/&]\s*|\s+)(?:(?i:and|or)\s+)?[(\[\"']?)+[A-Z][)\]\"'.]*")
"""Nothing but letters, as in `A, B` or `A) or (B)`."""


def extract_choice(solution_str: str, *, letters: str = LETTERS) -> str | None:
    """Return the letter in the last box or <answer> tag, else the last stated one, else the last option that
    is mentioned, else the last letter that stands alone. None if the answer is several letters.

    A stated letter is one as in "the answer is C"; "option C is wrong" only mentions one.
    """
    box = last_box(solution_str)
    for marked in (box and box.content, last_answer_tag(solution_str)):
        if marked is not None:
            bare = _bare(marked)
            if _SEVERAL.fullmatch(bare):
                return None
            letter = _only_letter(bare, letters)
            if letter:
                return letter
    tail = solution_str[-TAIL:]
    for pattern in (_STATED, _MENTIONED, _ALONE):
        found: list[tuple[str, str]] = [match for match in pattern.findall(tail) if match[0] in letters]
        if found:
            letter, alternative = found[-1]
            return None if alternative else letter
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
    bare = _bare(str(ground_truth))
    letter = None if _SEVERAL.fullmatch(bare) else _only_letter(bare, letters)
    if letter is None:
        raise ValueError(
            f"The ground truth {ground_truth!r} names no choice; give one letter of {letters!r} or its "
            "number."
        )
    return letter


def _bare(text: str) -> str:
    """Return the text without fonts, math mode and opening brackets."""
    return re.sub(r"\\(?:text|textbf|mathrm|mathbf)\b|[{}$*\\]", "", text).strip().lstrip("([\"' ")


def _only_letter(bare: str, letters: str) -> str | None:
    """Return the letter of `B`, `B)`, `B.` or `B) because ...`."""
    if not bare or bare[0].upper() not in letters:
        return None
    if len(bare) > 1 and (bare[1].isalnum() or bare[1] in "' "):
        return None
    return bare[0].upper()
