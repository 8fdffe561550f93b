"""Losses besides the policy losses: next-token cross entropy (SFT and PPO-ptx), and the value loss of a
critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import Totals, aggregate, masked_fill_zero, require_same_shape


def sft_loss(log_probs: Tensor, mask: Tensor, totals: Totals, *, mode: str = "token-mean") -> Tensor:
    """Cross entropy from the log-probs of the target tokens [B, T]: -Σ log π / tokens of the whole optimizer
    step.

    The mask is aligned with the targets: it is set where the *predicted* token is trained, the
    end-of-sequence included.
    """
    return aggregate(-log_probs, mask, mode, totals)


def ptx_loss(log_probs: Tensor, mask: Tensor, totals: Totals, *, coef: float) -> Tensor:
    """Pre-training loss mixed into RL (InstructGPT's PPO-ptx): coef times the cross entropy of pre-training
    text."""
    if coef < 0:
        raise ValueError(f"ptx coef must not be negative, got {coef}.")
    return coef * sft_loss(log_probs, mask, totals)


class ValueLoss(NamedTuple):
    """The result of the value loss."""

    per_token: Tensor  # [B, T], zero outside the mask
    metrics: dict[str, Tensor]  # [B, T] each, to be averaged over the mask


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float | None = 0.5
) -> ValueLoss:
    """½ max((V - G)², (V_c - G)²) with V_c = clip(V, V_old - c, V_old + c); without a clip range ½ (V - G)².

    `values` [B, T] are the predictions that are trained, `old_values` those of the rollout, `returns` the
    targets G.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip_range is not None and not clip_range > 0:
        raise ValueError(f"clip_range must be positive, got {clip_range}. Use None for no clipping.")
    values, old_values, returns = (masked_fill_zero(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    if clip_range is None:
        return ValueLoss(0.5 * error, {"vf_clipfrac": torch.zeros_like(error)})
    near = values.clamp(old_values - clip_range, old_values + clip_range)
    clipped_error = (near - returns).square()
    larger = (clipped_error > error).detach().to(error.dtype)
    return ValueLoss(0.5 * torch.maximum(error, clipped_error), {"vf_clipfrac": larger})
