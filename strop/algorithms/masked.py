"""Sums, means and variances over the tokens that count.

Positions outside the mask may hold anything, NaN included: they are replaced by zero before any arithmetic, in the value
and in the gradient.
"""

from __future__ import annotations

from torch import Tensor

EPS = 1e-8


def masked_fill_zero(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set and exact zeros elsewhere, whatever stood there."""
    return values.masked_fill(~mask.bool(), 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    return masked_fill_zero(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean over the mask; an empty mask gives 0."""
    return masked_sum(values, mask, dim) / (mask.sum(dim) + EPS)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over all masked positions of the tensor."""
    count = mask.sum()
    needed = 2 if unbiased else 1
    if count < needed:
        raise ValueError(f"A variance needs at least {needed} valid tokens, the mask has {int(count)} (mask shape {tuple(mask.shape)}).")
    centred = values - masked_mean(values, mask)
    variance = masked_mean(centred.square(), mask)
    return variance * (count / (count - 1)) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Zero mean and unit variance over the mask; positions outside it are scaled alike and mean nothing."""
    mean = masked_mean(values, mask)
    white = (values - mean) * (masked_var(values, mask) + EPS).rsqrt()
    return white if shift_mean else white + mean
