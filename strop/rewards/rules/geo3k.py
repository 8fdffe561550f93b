"""Geometry3K: a thought, then a boxed answer; nine tenths for the answer, one tenth for the shape."""

from __future__ import annotations

from typing import Any

from strop.rewards.rules import math_symbolic
from strop.rewards.rules.boxed import last_box
from strop.rewards.rules.format import think_boxed_format


def accuracy(solution_str: str, ground_truth: Any) -> float:
    """1 if the last box equals the truth as mathematics, else 0."""
    box = last_box(solution_str)
    return float(box is not None and math_symbolic.compare(box.content, str(ground_truth)) != "none")


def compute_score(solution_str: str, ground_truth: Any, *, format_share: float = 0.1) -> float:
    """(1 - format_share) · accuracy + format_share · format."""
    correct, shaped = accuracy(solution_str, ground_truth), think_boxed_format(solution_str)
    return (1.0 - format_share) * correct + format_share * shaped
