"""Denominators of the whole step: pieces add up, padding is nothing, empty is zero."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.aggregation import Totals, aggregate
from strop.algorithms.losses import value_loss
from strop.catalog import AGGREGATIONS

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def batch(seed: int, rows: int = 6, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
    return torch.randn(rows, width, generator=generator, dtype=torch.float64), mask


def test_all_modes_are_registered_under_both_spellings() -> None:
    assert set(AGGREGATIONS.names()) == {mode.replace("-", "_") for mode in MODES}
    assert AGGREGATIONS.get("token-mean") is AGGREGATIONS.get("token_mean")


def test_values_by_hand() -> None:
    loss = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [2, 2, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]])
    totals = Totals.of(mask)
    expected = {
        "token-mean": 35 / 12,
        "token-sum": 35.0,
        "seq-mean-token-sum": 8.75,
        "seq-mean-token-mean": 2.875,
        "seq-mean-token-sum-norm": 8.75 / 4,
    }
    for mode, value in expected.items():
        assert aggregate(loss, mask, mode, totals).item() == pytest.approx(value)
    scaled = aggregate(loss, mask, "seq-mean-token-sum-norm", Totals.of(mask, width=10))
    assert scaled.item() == pytest.approx(0.875)


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 5), max_size=3))
@settings(max_examples=25, deadline=None)
def test_micro_batches_add_up_to_the_whole_in_value_and_gradient(
    mode: str, seed: int, cuts: list[int]
) -> None:
    values, mask = batch(seed)
    totals = Totals.of(mask)
    whole = values.clone().requires_grad_()
    loss = aggregate(whole, mask, mode, totals)
    loss.backward()

    pieces = values.clone().requires_grad_()
    borders = sorted({0, *cuts, len(values)})
    shares = []
    for start, end in itertools.pairwise(borders):
        share = aggregate(pieces[start:end], mask[start:end], mode, totals)
        share.backward()
        shares.append(share.item())
    assert sum(shares) == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_padding_columns_with_nan_change_nothing(mode: str) -> None:
    values, mask = batch(3)
    padded = torch.cat(
        [values, torch.full((len(values), 4), math.nan, dtype=values.dtype)], 1
    ).requires_grad_()
    padded_mask = torch.cat([mask, torch.zeros(len(values), 4, dtype=mask.dtype)], 1)
    totals = Totals.of(mask)
    loss = aggregate(padded, padded_mask, mode, totals)
    loss.backward()
    assert loss.item() == pytest.approx(aggregate(values, mask, mode, totals).item())
    assert padded.grad is not None
    assert (padded.grad[padded_mask == 0] == 0).all()
    assert padded.grad.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_costs_nothing(mode: str) -> None:
    values = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3)
    loss = aggregate(values, mask, mode, Totals.of(mask))
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None and (values.grad == 0).all()


def test_empty_sequences_are_not_counted() -> None:
    totals = Totals.of(torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert (totals.tokens, totals.sequences, totals.width) == (2, 1, 3)


def test_errors_name_the_argument() -> None:
    values, mask = batch(0)
    with pytest.raises(ValueError, match=r"mask has shape \(6, 6\) but per_token has shape \(6, 7\)"):
        aggregate(values, mask[:, :6], "token-mean", Totals.of(mask))
    with pytest.raises(ValueError, match="Did you mean 'token_mean'"):
        aggregate(values, mask, "token-meen", Totals.of(mask))
    with pytest.raises(ValueError, match=r"\[sequences, tokens\]"):
        Totals.of(mask[0])
    with pytest.raises(ValueError, match="loss_scale_factor"):
        Totals.of(mask, width=0)


def test_value_loss_takes_the_larger_error_and_counts_it() -> None:
    values, old, returns = (
        torch.tensor([[1.0, 1.0, math.nan]]),
        torch.tensor([[0.0, 1.0, 9.0]]),
        torch.tensor([[1.0, 2.0, 9.0]]),
    )
    values.requires_grad_()
    result = value_loss(values, old, returns, torch.tensor([[1, 1, 0]]), clip_range=0.5)
    torch.testing.assert_close(result.per_token, torch.tensor([[0.125, 0.5, 0.0]]))
    assert result.metrics["vf_clipfrac"].tolist() == [[1.0, 0.0, 0.0]]
    result.per_token.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[0.0, -1.0, 0.0]]
    below = value_loss(*(torch.tensor([[x]]) for x in (-1.0, 0.0, -1.0, 1.0)), clip_range=0.5)
    assert below.per_token.item() == 0.125
    still = value_loss(*(torch.tensor([[x]]) for x in (2.0, 0.0, 3.0, 1.0)), clip_range=0.0)
    assert still.per_token.item() == 4.5, "with a range of 0 the value of the rollout"


def test_value_loss_without_a_clip_range_is_half_the_squared_error() -> None:
    one = torch.ones(2, 2)
    result = value_loss(3 * one, one, one, one, clip_range=None)
    assert (result.per_token == 2.0).all()
    for shapes in itertools.permutations([(2, 2), (2, 2), (2, 2), (2, 1)]):
        with pytest.raises(ValueError, match=r"has shape \(2, .\) but values has shape \(2, .\)"):
            value_loss(*map(torch.ones, shapes))
    with pytest.raises(ValueError, match="clip_range must be 0 or more, got -"):
        value_loss(one, one, one, one, clip_range=-0.5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_half_precision_losses_are_summed_and_counted_in_float32(mode: str) -> None:
    per_token = torch.full((2, 5001), 1.0, dtype=torch.bfloat16, requires_grad=True)
    loss = aggregate(per_token, torch.ones(2, 5001), mode, Totals.of(torch.ones(2, 5001)))
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(1.0, rel=1e-6)
    assert per_token.grad is not None and per_token.grad.dtype == torch.bfloat16
