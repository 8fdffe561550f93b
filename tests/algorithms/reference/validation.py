"""Single numbers of validation: pass@k from counts, and the value of the majority vote."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from strop.algorithms.metrics.validation import best_of, majority_of


def pass_at_k(count: int, correct: int, k: int) -> float:
    """Chance that one of k responses is right, drawn from `count` with `correct` right ones: 1 - C(n-c,
    k)/C(n, k)."""
    return best_of([1.0] * correct + [0.0] * (count - correct), k)[0]


def majority_value(values: Sequence[float], votes: Sequence[Hashable]) -> float:
    """The value of the first response that carries the most frequent vote; ties go to the vote seen first,
    None abstains."""
    return majority_of(values, votes, len(values))[0]
