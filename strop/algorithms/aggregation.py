"""Reduces a loss per token to one number, with denominators that are counted once per optimizer step; and
sums, means and variances over a mask.

An optimizer step is computed in pieces: micro-batches, ranks. An average of the means of the pieces gives
equal weight to pieces, not to tokens, so the result would depend on how the batch is split. Here the
denominators are counted once for the whole step (`Totals.of`) and passed to every piece; the results of the
pieces then add up:

    totals = Totals.of(whole_mask)
    for piece, mask in pieces:
        aggregate(piece, mask, "token-mean", totals).backward()

The only requirement is that a sequence is never split. Positions outside the mask may hold NaN; they
contribute exact zeros to the value and to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from strop.catalog import AGGREGATIONS
from strop.compat import Compat, conventions


@dataclass(frozen=True)
class Totals:
    """What one optimizer step is divided by, counted over all its micro-batches and ranks."""

    tokens: float  # tokens that count
    sequences: float  # sequences with at least one such token
    width: float  # the constant length that seq-mean-token-sum-norm divides by

    @classmethod
    def of(cls, mask: Tensor, *, width: float | None = None) -> Totals:
        """Count a whole step. `width` is `loss_scale_factor`, else the padded length [T] of the mask.

        An empty mask counts as one token in one sequence, so that its loss is 0 rather than 0/0.
        """
        if mask.dim() != 2:
            raise ValueError(
                f"mask must have the shape [sequences, tokens] to be counted, got {tuple(mask.shape)}."
            )
        if width is not None and not width > 0:
            raise ValueError(
                f"width (loss_scale_factor) must be positive, got {width}. Leave it out to use the padded "
                "length."
            )
        counts = as_weights(mask, torch.float32).sum(-1)
        tokens = int(counts.sum())
        sequences = int((counts > 0).sum())
        return cls(max(tokens, 1), max(sequences, 1), float(width or max(mask.shape[-1], 1)))


Aggregation = Callable[[Tensor, Tensor, Totals], Tensor]


def aggregate(per_token: Tensor, mask: Tensor, mode: str | Aggregation, totals: Totals) -> Tensor:
    """The contribution of `per_token` [B, T] over `mask` [B, T] to the loss of the step, by an aggregation or
    the one with this name.

    An aggregation gets the losses with zeros outside the mask, the mask as zeros and ones, and the totals.
    """
    require_same_shape(per_token=per_token, mask=mask)
    # Half precision can neither sum nor count the tokens of a row.
    per_token = per_token.to(torch.promote_types(per_token.dtype, torch.float32))
    weights = as_weights(mask, per_token.dtype)
    function: Aggregation = AGGREGATIONS.get(mode) if isinstance(mode, str) else mode
    return function(masked_fill_zero(per_token, mask, weights), weights, totals)


def token_sum(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ l"""
    return per_token.sum()


def token_mean(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ l / tokens: every token weighs the same (DAPO)."""
    return per_token.sum() / totals.tokens


def mean_metric(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """The mean over tokens, to be reported."""
    return aggregate(per_token, mask, token_mean, totals).detach()


def sequence_mean_token_sum(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ l / sequences: long answers weigh more."""
    return per_token.sum() / totals.sequences


def sequence_mean_token_mean(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ_i (Σ_t l_it / length_i) / sequences: every sequence weighs the same (GRPO)."""
    lengths = mask.sum(-1).clamp(min=1)
    return (per_token.sum(-1) / lengths).sum() / totals.sequences


def sequence_mean_token_sum_norm(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ l / (sequences · width): a constant length instead of the sampled one (Dr. GRPO)."""
    return per_token.sum() / (totals.sequences * totals.width)


# --- sums, means and variances over a mask ------------------------------------------------------------------
# Positions outside the mask may hold anything, NaN included: they are replaced by zero before any arithmetic,
# in the value and in the gradient.

EPS = 1e-8


def masked_fill_zero(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """`values` where the mask is set and exact zeros elsewhere, in the value and in the gradient.

    `weights` is the mask in the dtype of the values (`as_weights`), if the caller has it.
    """
    if values.device.type != "cpu" or not values.is_floating_point():
        return values.masked_fill(~mask.bool(), 0.0)
    if weights is None:
        weights = as_weights(mask, values.dtype)
    filled: Tensor = _ZeroOutside.apply(values, weights)
    return filled


class _ZeroOutside(torch.autograd.Function):
    """`masked_fill` for a CPU, where a product is several times faster than a selection.

    The product is exact unless something is not finite, and then the sum is not finite either. On a GPU the
    test of the sum would synchronise with the host, and a selection costs nothing there.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return _zero_outside(values, weights)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return _zero_outside(grad, weights), None


def _zero_outside(values: Tensor, weights: Tensor) -> Tensor:
    if torch.isfinite(values.sum()):
        return values * weights
    return values.masked_fill(weights == 0, 0.0)


def as_weights(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as zeros and ones, to multiply finite numbers with. This is several times faster than
    filling."""
    return mask.bool().view(torch.uint8).to(dtype)


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum over the mask."""
    return masked_fill_zero(values, mask).sum(dim)


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None, *, eps: float = EPS
) -> Tensor:
    """Mean over the mask; an empty mask gives 0, or NaN with `eps=0`."""
    return masked_sum(values, mask, dim) / (mask.sum(dim) + eps)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over all masked positions of the tensor."""
    count = mask.sum()
    needed = 2 if unbiased else 1
    if count < needed:
        raise ValueError(
            f"A variance needs at least {needed} valid tokens, the mask has {int(count)} (shape "
            f"{tuple(mask.shape)})."
        )
    return _variance(_centred(values, mask), count, unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, *, compat: Compat = None) -> Tensor:
    """Zero mean and unit variance over the mask (unbiased variance + 1e-8); the mean is put back if not
    `shift_mean`.

    Positions outside the mask become 0; `compat="verl"` shifts and scales them like the others.
    """
    count = mask.sum()
    if count < 2:
        raise ValueError(
            f"Whitening needs at least 2 valid tokens, the mask {tuple(mask.shape)} has {int(count)}."
        )
    keep_outside = conventions(compat).outside_mask == "kept"
    centred = _centred(values, mask)
    scale = (_variance(centred, count, unbiased=True) + EPS).rsqrt()
    if shift_mean and not keep_outside:
        return centred * scale
    mean = masked_mean(values, mask)
    if keep_outside:
        offset: Tensor | float = mean
        if shift_mean:
            offset = 0.0
        return (values - mean) * scale + offset
    return masked_fill_zero(centred * scale + mean, mask)


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    """Values minus their mean over the mask, 0 outside it."""
    weights = as_weights(mask, values.dtype)
    kept = masked_fill_zero(values, mask, weights)
    return (kept - kept.sum() / (mask.sum() + EPS)) * weights


def _variance(centred: Tensor, count: Tensor, unbiased: bool) -> Tensor:
    variance = centred.square().sum() / (count + EPS)
    if unbiased:
        variance = variance * (count / (count - 1))
    return variance


# --- shapes -------------------------------------------------------------------------------------------------


def require_same_shape(**tensors: Tensor | None) -> None:
    """Refuse tensors of different shapes, before broadcasting hides the mistake. None counts as not given."""
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    first, shape = next(iter(given.items()))
    for name, other in given.items():
        if other != shape:
            raise ValueError(f"{name} has shape {other} but {first} has shape {shape}; they must be equal.")
