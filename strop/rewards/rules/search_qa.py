"""Open-domain questions: the text in the last <answer> tag, matched as in SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

OPEN = "<answer>"
CLOSE = "</answer>"
MAX_TAGS = 10
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def extract_answer(solution_str: str) -> str | None:
    """Return the text in the last complete <answer>...</answer>."""
    answer = None
    position = 0
    while True:
        start = solution_str.find(OPEN, position)
        if start < 0:
            return answer
        end = solution_str.find(CLOSE, start)
        if end < 0:
            return answer
        answer = solution_str[start + len(OPEN) : end].strip()
        position = end + len(CLOSE)


def accepted_answers(ground_truth: object) -> list[str]:
    """Return the accepted answers of a string, a list, or a mapping with `target` that holds either."""
    if isinstance(ground_truth, Mapping):
        if "target" not in ground_truth:
            raise ValueError(
                "The ground truth of a search question needs the key 'target', it has "
                f"{sorted(ground_truth)}."
            )
        ground_truth = ground_truth["target"]
    if hasattr(ground_truth, "tolist"):  # a numpy array, as parquet readers return
        ground_truth = ground_truth.tolist()
    if not isinstance(ground_truth, Sequence) or isinstance(ground_truth, str):
        return [str(ground_truth)]
    targets = [str(target) for target in ground_truth if target is not None]
    if not targets:
        raise ValueError("The ground truth of a search question accepts no answer: its list is empty.")
    return targets


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    match: str = "exact",
    score: float = 1.0,
    format_score: float = 0.0,
) -> float:
    """Return `score` for an accepted answer, `format_score` for another answer, 0 if there is none.

    `match="substring"`: the answer must contain an accepted one. A text with more than 10 <answer> tags
    guesses: an exact match then earns a quarter of `score`.
    """
    if match not in ("exact", "substring"):
        raise ValueError(f"search_qa matches by 'exact' or 'substring', not {match!r}.")
    accepted = accepted_answers(ground_truth)
    # Lists of spellings have some like "A" and "!", of which nothing is left: any text would contain them.
    spellings = [normalise(target) for target in accepted]
    targets = [target for target in spellings if target] or spellings
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    given = normalise(answer)
    if not any(spellings) and any(accepted):  # compared as they are written
        targets = [target.lower() for target in accepted]
        given = answer.lower()
        match = "exact"
    if match == "substring":
        if any(target in given for target in targets):
            return score
        return format_score
    if given not in targets:
        return format_score
    if max(solution_str.count(OPEN), solution_str.count(CLOSE)) > MAX_TAGS:
        return score / 4
    return score
