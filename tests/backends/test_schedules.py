"""Schedules at their corners: first step, end of warm-up, end of the run and beyond."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.backends.optimizer import (
    constant,
    cosine,
    linear,
    make_schedule,
    make_scheduler,
    warmup_length,
    wsd,
)
from strop.catalog import SCHEDULES
from strop.config.schema.model import OptimConfig


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_the_first_update_is_not_wasted_and_warm_up_reaches_one(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make_scheduler(optimizer, name, total_steps=20, warmup_steps=4)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert min(rates) > 0.0


def test_one_step_of_warm_up_is_at_the_full_rate() -> None:
    assert [constant(step, warmup_steps=1) for step in range(2)] == [1.0, 1.0]


def test_no_steps_of_warm_up_need_no_length_of_the_run() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    ratio = OptimConfig(lr_warmup_steps_ratio=0.1)
    make_schedule(optimizer, dataclasses.replace(ratio, lr_warmup_steps=0))
    with pytest.raises(ValueError, match="share of total_training_steps"):
        make_schedule(optimizer, ratio)


def test_compat_verl_starts_at_zero_and_swings_up_again() -> None:
    assert constant(0, warmup_steps=5, compat="verl") == 0.0
    assert cosine(15, total_steps=10, compat="verl") > 0.4
    assert cosine(15, total_steps=10) == 0.0


@given(st.integers(1, 200), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_factors_fall_from_one_to_the_floor_and_stay(
    total: int, warmup: int, floor: float, stable: float
) -> None:
    warmup = min(warmup, total)
    schedules = (
        lambda step: cosine(step, total_steps=total, warmup_steps=warmup, min_ratio=floor),
        lambda step: linear(step, total_steps=total, warmup_steps=warmup, min_ratio=floor),
        lambda step: wsd(step, total_steps=total, warmup_steps=warmup, min_ratio=floor, stable_ratio=stable),
    )
    for factor in schedules:
        after = [factor(step) for step in range(warmup, total + 5)]
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
        assert all(floor - 1e-12 <= value <= 1.0 + 1e-12 for value in after)
        assert after[-1] == pytest.approx(floor if total > warmup else after[-1])


def test_linear_and_wsd_by_hand() -> None:
    assert [linear(s, total_steps=4, min_ratio=0.2) for s in range(5)] == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2]
    )
    assert [wsd(s, total_steps=10, stable_ratio=0.5) for s in (0, 4, 5)] == [1.0, 1.0, 1.0]
    assert wsd(10, total_steps=10, stable_ratio=0.5, min_ratio=0.1) == pytest.approx(0.1)


def test_warm_up_by_steps_wins_over_ratio() -> None:
    assert warmup_length(100, ratio=0.03) == 3
    assert warmup_length(10, ratio=0.25) == 2 and warmup_length(10, ratio=0.25, compat="trl") == 3
    assert warmup_length(100, steps=0, ratio=0.5) == 0
    with pytest.raises(ValueError, match="between 0 and 1, it is 3"):
        warmup_length(100, ratio=3)


@pytest.mark.parametrize(
    ("name", "given_settings", "message"),
    [
        ("cosine", {}, "needs total_steps"),
        ("cosine", {"total_steps": 5, "min_lr": 0.1}, "not \\['min_lr'\\]"),
        ("cosine", {"total_steps": 5, "min_ratio": 2}, "min_ratio must lie between 0 and 1, it is 2"),
        ("constant", {"warmup_steps": -1}, "warmup_steps >= 0"),
        ("cosin", {"total_steps": 5}, "Did you mean 'cosine'"),
    ],
)
def test_bad_settings_are_named(name: str, given_settings: dict[str, float], message: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=message):
        make_scheduler(optimizer, name, **given_settings)


def test_constant_ignores_settings_of_other_schedules() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    make_scheduler(optimizer, "constant", total_steps=10, min_ratio=0.1, num_cycles=0.5)
    assert optimizer.param_groups[0]["lr"] == 1.0
