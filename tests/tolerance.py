"""Tolerances derived from floating-point arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_tolerance(dtype: torch.dtype, terms: int, magnitude: float) -> float:
    """How far apart two orders of summation may be: every one of `terms` additions rounds by at most half a
    unit in the last place of a partial sum, which `magnitude` (the sum of absolute terms) bounds, in each of
    the two sums."""
    return torch.finfo(dtype).eps * terms * magnitude


def assert_same_sum(found: Tensor, expected: Tensor, *, terms: int) -> None:
    """Both are sums of the same `terms` numbers of the size of the largest element, in another order."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    limit = sum_tolerance(expected.dtype, terms, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=limit)
