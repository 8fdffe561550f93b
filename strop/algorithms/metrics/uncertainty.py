"""How far a mean over prompts can be trusted: intervals by bootstrap, and a test for two systems on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ELEMENTS_AT_ONCE = 1 << 22


class Estimate(NamedTuple):
    """A mean and the interval around it; without draws the interval is not known."""

    mean: float
    low: float | None = None
    high: float | None = None
    prompts: int = 0
    """How many it is a mean of."""


def bootstrap_mean(values: Sequence[float], *, draws: int = 1000, confidence: float = 0.95, seed: int = 42) -> Estimate:
    """The mean, and the percentile interval of means of `draws` samples of the prompts with replacement.

    Prompts are drawn, not responses: the responses to one prompt are alike, and counting each as evidence of its own would make
    the interval too narrow.
    """
    numbers = np.asarray(values, dtype=float)
    if not len(numbers):
        raise ValueError("There is no prompt to take the mean of.")
    mean = float(numbers.mean())
    if draws < 1:
        return Estimate(mean, prompts=len(numbers))
    generator = np.random.default_rng(seed)
    at_once = max(1, ELEMENTS_AT_ONCE // len(numbers))
    means = np.concatenate(
        [
            numbers[generator.integers(0, len(numbers), (min(at_once, draws - start), len(numbers)))].mean(axis=1)
            for start in range(0, draws, at_once)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean, float(low), float(high), len(numbers))


def sign_test(gained: int, lost: int) -> float:
    """Chance that a fair coin divides gained + lost flips at least this unevenly (two-sided, exact; McNemar's test).

    >>> sign_test(0, 0), sign_test(3, 3), round(sign_test(9, 1), 4)
    (1.0, 1.0, 0.0215)
    """
    flips, most = gained + lost, max(gained, lost)
    ways, tail = math.comb(flips, most), 0
    for count in range(most, flips + 1):
        tail += ways
        ways = ways * (flips - count) // (count + 1)
    return min(1.0, 2 * tail / 2**flips)
