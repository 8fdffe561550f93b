"""Sums and the like: the response must be the number, and nothing else."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 for exactly the expected text, blanks around it aside; otherwise 0.0.

    >>> compute_score(" 42", "42"), compute_score("42.", "42")
    (1.0, 0.0)
    """
    return float(solution_str.strip() == str(ground_truth))
