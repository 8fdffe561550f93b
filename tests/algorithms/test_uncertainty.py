"""Intervals cover the truth as often as they promise; the sign test agrees with the binomial distribution."""

from __future__ import annotations

import numpy as np
import pytest

from strop.algorithms.metrics.validation import Estimate, bootstrap_mean, majority_of, sign_test
from tests.algorithms.reference.validation import majority_value, pass_at_k


def test_intervals_cover_the_truth():
    generator = np.random.default_rng(0)
    inside = 0
    for trial in range(300):
        found = bootstrap_mean(generator.random(80) < 0.3, draws=300, confidence=0.9, seed=trial)
        inside += found.low <= 0.3 <= found.high
    assert 0.85 < inside / 300 < 0.95


def test_the_interval_is_that_of_theory():
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = bootstrap_mean(values, draws=4000)
    half = 1.96 * values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.02) and found.high == pytest.approx(
        values.mean() + half, abs=0.02
    )


def test_a_seed_gives_the_same_interval_whatever_is_computed_at_once(monkeypatch):
    values = [0.0, 1.1, 1.2, 0.3, 0.4]
    first = bootstrap_mean(values, seed=3)
    assert first == bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)
    monkeypatch.setattr("strop.algorithms.metrics.validation.ELEMENTS_AT_ONCE", 20)
    assert bootstrap_mean(values, seed=3) == first
    assert bootstrap_mean(values, draws=0) == Estimate(pytest.approx(0.6), None, None, 5)
    with pytest.raises(ValueError, match="no prompt"):
        bootstrap_mean([])


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (9, 1, 0.021484375), (8, 8, 1.0)]
)
def test_sign_test(gained, lost, p):
    assert sign_test(gained, lost) == sign_test(lost, gained) == pytest.approx(p)


def test_sign_test_of_many():
    assert sign_test(3000, 2700) == pytest.approx(
        7.4e-5, rel=0.1
    )  # normal approximation: z = (300 - 1) / sqrt(5700)


def test_pass_at_k_is_the_unbiased_estimator():
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / 10)  # 1 - C(3,3)/C(5,3)
    assert pass_at_k(10, 0, 4) == 0.0 and pass_at_k(10, 7, 4) == 1.0


def test_who_has_no_answer_does_not_vote():
    assert majority_value([0.0, 0.0, 1.0], [None, None, "4"]) == 1.0
    assert majority_value([0.0, 0.0], [None, None]) == 0.0
    # Of the pairs: (no answer, 4), (no answer, 4), (no answer, no answer).
    assert majority_of([0.0, 0.0, 1.0], [None, None, "4"], 2)[0] == pytest.approx(2 / 3)
