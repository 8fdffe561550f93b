"""Sums and the like: the response must be the number, and nothing else."""

from __future__ import annotations

from typing import Any

PARTLY_RIGHT = 0.5


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1.0 for exactly the expected text; otherwise up to half of it for characters that stand in the right place.

    The part credit gives a model that is never quite right something to follow; `acc` counts only exact answers.

    >>> compute_score(" 42", "42")
    {'score': 1.0, 'acc': 1.0, 'pred': '42'}
    >>> compute_score("47", "42")["score"], compute_score("", "42")["score"]
    (0.25, 0.0)
    """
    answer, expected = solution_str.strip(), str(ground_truth)
    exact = answer == expected
    right = sum(a == b for a, b in zip(answer, expected))
    score = 1.0 if exact else PARTLY_RIGHT * right / max(len(answer), len(expected), 1)
    return {"score": score, "acc": float(exact), "pred": answer}
