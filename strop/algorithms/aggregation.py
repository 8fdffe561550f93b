"""From a loss per token to one number, with denominators that everybody agrees on.

An optimizer step is computed in pieces: micro-batches, ranks. A mean taken inside each piece and averaged afterwards weighs
pieces, not tokens, so the result would depend on how the batch was cut. Here the denominators are counted once for the whole
step (`Totals.of`) and handed to every piece; the pieces then simply add up:

    totals = Totals.of(whole_mask)
    for piece, mask in pieces:
        aggregate(piece, mask, "token-mean", totals).backward()

The only requirement is that a sequence is never cut in two. Positions outside the mask may hold NaN; they contribute exact
zeros to the value and to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.masked import as_weights, masked_fill_zero
from strop.algorithms.shapes import require_same_shape
from strop.catalog import AGGREGATIONS


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
            raise ValueError(f"mask must have the shape [sequences, tokens] to be counted, got {tuple(mask.shape)}.")
        if width is not None and not width > 0:
            raise ValueError(f"width (loss_scale_factor) must be positive, got {width}. Leave it out to use the padded length.")
        counts = as_weights(mask, torch.float32).sum(-1) if mask.dtype == torch.bool else mask.sum(-1)
        tokens, sequences = int(counts.sum()), int((counts > 0).sum())
        return cls(max(tokens, 1), max(sequences, 1), float(width or max(mask.shape[-1], 1)))


def aggregate(per_token: Tensor, mask: Tensor, mode: str, totals: Totals) -> Tensor:
    """Reduce `per_token` [B, T] over `mask` [B, T] in the named way; the share of this piece in the loss of the step.

    An aggregation gets the losses with zeros outside the mask, the mask as zeros and ones, and the totals.
    """
    require_same_shape(per_token=per_token, mask=mask)
    # Half precision can neither sum nor count the tokens of a row.
    per_token = per_token.to(torch.promote_types(per_token.dtype, torch.float32))
    weights = as_weights(mask, per_token.dtype)
    share: Tensor = AGGREGATIONS.get(mode)(masked_fill_zero(per_token, mask, weights), weights, totals)
    return share


def token_sum(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ l"""
    return per_token.sum()


def token_mean(per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ l / tokens: every token weighs the same (DAPO)."""
    return per_token.sum() / totals.tokens


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
