"""Open-domain questions: the last <answer>, matched as SQuAD does (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<answer>", "</answer>"
MOST_TAGS = 10
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def extract_answer(solution_str: str) -> str | None:
    """What stands in the last complete <answer>...</answer>."""
    answer, place = None, 0
    while True:
        start = solution_str.find(OPEN, place)
        end = solution_str.find(CLOSE, start) if start >= 0 else -1
        if end < 0:
            return answer
        answer, place = solution_str[start + len(OPEN) : end].strip(), end + len(CLOSE)


def targets_of(ground_truth: Any) -> list[str]:
    """The accepted answers: a string, a list, or a mapping with `target` holding either."""
    if isinstance(ground_truth, Mapping):
        if "target" not in ground_truth:
            raise ValueError(f"The ground truth of a search question needs the key 'target', it has {sorted(ground_truth)}.")
        ground_truth = ground_truth["target"]
    if hasattr(ground_truth, "tolist"):  # a numpy array, as parquet readers give
        ground_truth = ground_truth.tolist()
    if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str):
        return [str(target) for target in ground_truth]
    return [str(ground_truth)]


def compute_score(
    solution_str: str, ground_truth: Any, *, match: str = "exact", score: float = 1.0, format_score: float = 0.0
) -> float:
    """`score` if the answer equals a target (`match="substring"`: contains one), `format_score` for another answer, 0 for none.

    A text that opens or closes more than 10 answers is fishing: an exact match then earns a quarter.
    """
    if match not in ("exact", "substring"):
        raise ValueError(f"search_qa matches by 'exact' or 'substring', not {match!r}.")
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    given, targets = normalise(answer), [normalise(target) for target in targets_of(ground_truth)]
    if match == "substring":
        return score if any(target in given for target in targets) else format_score
    if given not in targets:
        return format_score
    fishing = max(solution_str.count(OPEN), solution_str.count(CLOSE)) > MOST_TAGS
    return score / 4 if fishing else score
