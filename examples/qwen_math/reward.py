"""The reward of a response: 1 if its last `\\boxed{}` equals the answer by value, else 0."""

from __future__ import annotations

from strop.catalog import SCORERS
from strop.rewards.rules.math_boxed import compute_score


@SCORERS.register("generated_math", sources=("generated_math/*",))
def score(solution_str: str, ground_truth: object) -> float:
    return compute_score(solution_str, ground_truth)
