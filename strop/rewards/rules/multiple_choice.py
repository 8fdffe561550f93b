"""Multiple choice: the letter that the response chooses."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from strop.rewards.rules.extract import last_box
from strop.rewards.rules.search_qa import extract_answer as last_answer_tag

TAIL = 300
STATED_TAIL = 2000
"""An explanation may follow behind a statement, where single letters say little."""
LETTERS = "ABCDEFGHIJ"
_IS = (
    r"(?i:\s{0,5}(?:is(?: [a-z]{1,20}ly| therefore| thus| indeed)?\s{0,5}:?|(?:would|should|must|will) be"
    r"|:|是|为))"
)
_OPENING = r"(?:[\s_(\[\"'<]|(?i:option|choice|either|both)\b){0,10}"
_CLOSING = r"[)\]\"'_>]{0,3}"
# Behind A and I an English word shows that they are an article and a pronoun; small letters may be words.
_ONE = (
    r"(?:[B-HJ-Z]|[AI](?!\s{1,3}(?!(?:and|as|because|but|for|is|not|or|rather|since|which|with)\b)[a-z])"
    r"|(?<=\()[a-z](?=\))|[a-z](?=[.)]?\s*(?:\n|\Z)))(?![A-Za-z0-9]|['-][A-Za-z0-9]|\s?[=^])"
)
_ANOTHER = rf"(?: {{0,3}}(?:[/&+,]|,? ?(?i:or|and)\b) {{0,3}}| )[(\[\"']?[A-HJ-Z]{_CLOSING}(?![A-Za-z'])"
_MORE = rf"{_CLOSING}((?= {{0,3}}(?:/|(?i:or)\b)){_ANOTHER}|(?:{_ANOTHER}){{1,9}}(?= {{0,3}}(?:[.;\n]|\Z)))?"
_STATED = (
    re.compile(
        rf"(?:(?:(?i:answer)(?:{_IS}|(?!\s{{0,5}}(?i:choice|option)))|(?i:choice|option){_IS})"
        rf"|(?:答案|选择|故选){_IS}?){_OPENING}({_ONE}){_MORE}"
    ),
    re.compile(rf"\b({_ONE}){_CLOSING} is (?:the )?(?:most |best )?(?:correct|right|best|answer)\b()"),
    re.compile(rf"(?:\A|\n)[\s_(\[\"']{{0,5}}([A-Z]){_CLOSING}[.:]?()\s*\Z"),  # a last line of its own
)
_MENTIONED = (re.compile(rf"(?i:choice|option){_OPENING}({_ONE}){_MORE}"),)
_ALONE = (re.compile(r"(?<![A-Za-z'])\(?([A-Z])[_\]\"']{0,4}(?:[).:。]|(?=\s*$))()"),)
_SEVERAL = re.compile(r"(?:[A-Z][)\]\"'.]?(?:\s*[,;/&+]\s*|\s+)(?:(?i:and|or)\s+)?[(\[\"']?)+[A-Z][)\]\"'.]*")
"""Nothing but letters, as in `A, B` or `A) or (B)`."""


def extract_choice(solution_str: str, *, letters: str = LETTERS) -> str | None:
    """Return the letter in the last box or <answer> tag, else the last stated one, else the last option that
    is mentioned, else the last letter that stands alone. None if the answer is several letters.

    A stated letter is one as in "the answer is C", "C is correct", or in a last line of its own; "option C is
    wrong" only mentions one. Text up to a last `</think>` does not answer.
    """
    answer = unicodedata.normalize("NFKC", solution_str.rpartition("</think>")[2])
    box = last_box(answer)
    for marked in (box and box.content, last_answer_tag(answer)):
        if marked is not None:
            bare = _bare(marked)
            if _SEVERAL.fullmatch(bare):
                return None
            letter = _only_letter(bare, letters)
            if letter:
                return letter
    tail = _plain(answer[-STATED_TAIL:])
    if _SEVERAL.fullmatch(tail.strip()):
        return None
    for patterns, text in ((_STATED, tail), (_MENTIONED, tail[-TAIL:]), (_ALONE, tail[-TAIL:])):
        found = _last_match(patterns, text, letters)
        if found:
            return None if found[2] else found[1].upper()
    return None


def _last_match(patterns: Sequence[re.Pattern[str]], text: str, letters: str) -> re.Match[str] | None:
    """Return the match that ends last, of those of one of the letters."""
    found = [match for pattern in patterns for match in pattern.finditer(text)]
    return max((match for match in found if match[1].upper() in letters), key=re.Match.end, default=None)


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
    return _plain(text).strip().lstrip("([\"' ")


def _plain(text: str) -> str:
    """Return the text without fonts and math mode."""
    return re.sub(r"\\(?:text|textbf|mathrm|mathbf)\b|[{}$*`\\]", "", text)


def _only_letter(bare: str, letters: str) -> str | None:
    """Return the letter of `B`, `B)`, `B.` or `B) because ...`."""
    if not bare or bare[0].upper() not in letters:
        return None
    if len(bare) > 1 and (bare[1].isalnum() or bare[1] in "' "):
        return None
    return bare[0].upper()
