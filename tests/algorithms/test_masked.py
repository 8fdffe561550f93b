from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.aggregation import as_weights, masked_mean, masked_sum, masked_var, masked_whiten
from tests.algorithms.reference.masked import clamp_between, mask_through_stop, masked_normalise
from tests.algorithms.reference.padding import pad_or_truncate, strip_padding


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(2, 9), st.integers(0, 99))
def test_nan_outside_the_mask_reaches_no_value_and_no_gradient(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    mask = torch.rand(rows, width) < 0.6
    mask[0, :2] = True
    clean = torch.randn(rows, width)
    dirty = clean.masked_fill(~mask, torch.nan).requires_grad_()
    for function in (masked_sum, masked_mean, masked_var):
        torch.testing.assert_close(function(dirty, mask), function(clean, mask))
    torch.testing.assert_close(masked_whiten(dirty, mask), masked_whiten(clean, mask))
    torch.testing.assert_close(masked_normalise(dirty, mask, 1), masked_normalise(clean, mask, 1))
    masked_mean(dirty, mask).backward()
    assert dirty.grad is not None
    assert (dirty.grad[~mask] == 0).all() and torch.isfinite(dirty.grad).all()


def test_moments_agree_with_torch_on_the_kept_values() -> None:
    torch.manual_seed(1)
    values, mask = torch.randn(4, 6), torch.rand(4, 6) < 0.5
    kept = values[mask]
    torch.testing.assert_close(masked_mean(values, mask), kept.mean())
    torch.testing.assert_close(masked_var(values, mask), kept.var())
    torch.testing.assert_close(masked_var(values, mask, unbiased=False), kept.var(unbiased=False))
    white = masked_whiten(values, mask)
    torch.testing.assert_close(white[mask], (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-5)
    assert (white[~mask] == 0).all()
    torch.testing.assert_close(masked_whiten(values, mask, shift_mean=False)[mask].mean(), kept.mean())


def test_empty_masks() -> None:
    values, mask = torch.ones(2, 3), torch.zeros(2, 3)
    assert masked_mean(values, mask) == 0 and masked_mean(values, mask, eps=0).isnan()
    assert (masked_normalise(values, mask, 1) == 0).all()
    with pytest.raises(ValueError, match=r"at least 2 valid tokens, the mask has 0 \(shape \(2, 3\)\)"):
        masked_var(values, mask)
    one = torch.tensor([[1, 0, 0], [0, 0, 0]])
    assert masked_var(values, one, unbiased=False) == 0
    with pytest.raises(ValueError, match=r"at least 2 valid tokens, the mask has 1"):
        masked_var(values, one)
    with pytest.raises(ValueError, match=r"at least 2 valid tokens, the mask \(2, 3\) has 1"):
        masked_whiten(values, one)


def test_weights_of_every_kind_of_mask() -> None:
    for mask in (torch.tensor([True, False]), torch.tensor([1, 0]), torch.tensor([1.0, 0.0])):
        assert as_weights(mask, torch.float64).tolist() == [1.0, 0.0]


def test_lower_bound_wins_where_bounds_cross() -> None:
    made = clamp_between(
        torch.tensor([0.0, 5.0, -5.0]), torch.tensor([1.0, -1.0, -1.0]), torch.tensor([-1.0, 1.0, 1.0])
    )
    assert made.tolist() == [1.0, 1.0, -1.0]


def test_mask_keeps_the_first_stop_token_and_nothing_after() -> None:
    ids = torch.tensor([[5, 2, 2, 5], [5, 5, 5, 5], [1, 5, 2, 5]])
    assert mask_through_stop(ids, 2).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert mask_through_stop(ids, [1, 2]).tolist()[2] == [1, 0, 0, 0]


def test_rows_are_brought_to_one_width() -> None:
    ids, mask = torch.tensor([[7, 1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1, 1]])
    cut = {"left": [2, 3, 4], "right": [7, 1, 2], "middle": [7, 3, 4]}
    for truncation, expected in cut.items():
        assert pad_or_truncate(ids, mask, width=3, pad_id=0, truncation=truncation)[0].tolist() == [expected]  # type: ignore[arg-type]
    assert pad_or_truncate(ids, mask, width=6, pad_id=9, pad_side="right")[0].tolist() == [[7, 1, 2, 3, 4, 9]]
    assert strip_padding(ids, mask) == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match=r"Rows of 5 tokens do not fit into width=3"):
        pad_or_truncate(ids, mask, width=3, pad_id=0)
    with pytest.raises(ValueError, match=r"token_ids \(1, 5\) and attention_mask \(1, 4\)"):
        pad_or_truncate(ids, mask[:, :4], width=3, pad_id=0)
