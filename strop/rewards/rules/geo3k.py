"""Geometry3K: a <think> part, then a boxed answer; 0.9 of the score is for the answer, 0.1 for the format."""

from __future__ import annotations

from typing import Literal

from strop.rewards.rules import math_symbolic
from strop.rewards.rules.extract import last_box
from strop.rewards.rules.format import think_boxed_format


def accuracy(solution_str: str, ground_truth: object, *, compat: Literal["verl"] | None = None) -> float:
    """Return 1 if the last box is mathematically equal to the ground truth, else 0."""
    box = last_box(solution_str)
    if box is None:
        return 0.0
    return float(math_symbolic.compare(box.content, str(ground_truth), compat=compat) != "none")


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    format_share: float = 0.1,
    compat: Literal["verl"] | None = None,
) -> float:
    """Return (1 - format_share) · accuracy + format_share · format.

    `compat="verl"` compares with math-verify.
    """
    correct = accuracy(solution_str, ground_truth, compat=compat)
    formatted = think_boxed_format(solution_str)
    return (1.0 - format_share) * correct + format_share * formatted
