"""Sums, means and variances over the tokens that count.

Positions outside the mask may hold anything, NaN included: they are replaced by zero before any arithmetic, in the value
and in the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

EPS = 1e-8

# Which peer's number to give where ours deliberately differs; None is our own choice.
Compat = Literal["verl", "openrlhf"] | None


def masked_fill_zero(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """`values` where the mask is set and exact zeros elsewhere, whatever stood there; the same of its gradient.

    `weights` is the mask in the dtype of the values (`as_weights`), if at hand.
    """
    if values.device.type != "cpu" or not values.is_floating_point():
        return values.masked_fill(~mask.bool(), 0.0)
    filled: Tensor = _ZeroOutside.apply(values, as_weights(mask, values.dtype) if weights is None else weights)
    return filled


class _ZeroOutside(torch.autograd.Function):
    """`masked_fill` for a CPU, where a product is several times faster than a selection.

    The product is exact unless something is not finite, and then the sum is not finite either. On a device that question would
    make the processor wait, and a selection costs nothing there.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return values * weights if torch.isfinite(values.sum()) else values.masked_fill(weights == 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return (grad * weights if torch.isfinite(grad.sum()) else grad.masked_fill(weights == 0, 0.0)), None


def as_weights(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as zeros and ones to multiply finite numbers with, which is several times faster than filling."""
    return mask.bool().view(torch.uint8).to(dtype)


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    return masked_fill_zero(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None, *, eps: float = EPS) -> Tensor:
    """Mean over the mask; an empty mask gives 0, or NaN with `eps=0`."""
    return masked_sum(values, mask, dim) / (mask.sum(dim) + eps)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over all masked positions of the tensor."""
    count = mask.sum()
    needed = 2 if unbiased else 1
    if count < needed:
        raise ValueError(
            f"A variance needs at least {needed} valid tokens, the mask has {int(count)} (shape {tuple(mask.shape)})."
        )
    return _variance(_centred(values, mask), count, unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, *, compat: Compat = None) -> Tensor:
    """Zero mean and unit variance over the mask (unbiased variance + 1e-8); the mean is put back if not `shift_mean`.

    Positions outside the mask become 0; `compat="verl"` shifts and scales them like the others.
    """
    count = mask.sum()
    if count < 2:
        raise ValueError(f"Whitening needs at least 2 valid tokens, the mask {tuple(mask.shape)} has {int(count)}.")
    centred = _centred(values, mask)
    scale = (_variance(centred, count, unbiased=True) + EPS).rsqrt()
    if shift_mean and compat != "verl":
        return centred * scale
    mean = masked_mean(values, mask)
    if compat == "verl":
        return (values - mean) * scale + (0.0 if shift_mean else mean)
    return masked_fill_zero(centred * scale + mean, mask)


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    """Values less their mean over the mask, 0 outside it."""
    weights = as_weights(mask, values.dtype)
    kept = masked_fill_zero(values, mask, weights)
    return (kept - kept.sum() / (mask.sum() + EPS)) * weights


def _variance(centred: Tensor, count: Tensor, unbiased: bool) -> Tensor:
    variance = centred.square().sum() / (count + EPS)
    return variance * (count / (count - 1)) if unbiased else variance


def masked_normalise(values: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Zero mean and unit population variance along one dimension, 0 outside the mask; an empty slice stays 0."""
    count = mask.sum(dim, keepdim=True).clamp(min=1)
    kept = masked_fill_zero(values, mask)
    centred = masked_fill_zero(kept - kept.sum(dim, keepdim=True) / count, mask)
    return centred * (centred.square().sum(dim, keepdim=True) / count + EPS).rsqrt()


def clamp_between(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clamp to tensor bounds, the lower one winning where they cross (`torch.clamp` lets the upper one win)."""
    return torch.maximum(torch.minimum(values, high), low)


def mask_through_stop(token_ids: Tensor, stop_ids: int | Sequence[int]) -> Tensor:
    """1 up to and with the first stop token of each row, 0 after it; a row without one is all 1."""
    stops = torch.as_tensor([stop_ids] if isinstance(stop_ids, int) else list(stop_ids), device=token_ids.device)
    stopped = torch.isin(token_ids, stops).long()
    return (stopped.cumsum(-1) - stopped == 0).long()
