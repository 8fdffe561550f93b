"""Arithmetic: the response must be the number and nothing else."""

from __future__ import annotations

PARTIAL_CREDIT = 0.5


def compute_score(solution_str: str, ground_truth: object) -> dict[str, object]:
    """Return 1.0 for exactly the expected text, else up to 0.5 for characters in the right position.

    The partial credit gives a gradient to a model that is never quite right; `acc` counts exact answers only.

    >>> compute_score(" 42", "42")
    {'score': 1.0, 'acc': 1.0, 'pred': '42'}
    >>> compute_score("47", "42")["score"], compute_score("", "42")["score"]
    (0.25, 0.0)
    """
    answer = solution_str.strip()
    expected = str(ground_truth)
    exact = answer == expected
    if exact:
        score = 1.0
    else:
        matching = sum(a == b for a, b in zip(answer, expected))
        score = PARTIAL_CREDIT * matching / max(len(answer), len(expected), 1)
    return {"score": score, "acc": float(exact), "pred": answer}
