"""What a critic is trained on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.masked import masked_fill_zero
from strop.algorithms.shapes import require_same_shape


class ValueLoss(NamedTuple):
    per_token: Tensor  # [B, T], zero outside the mask
    metrics: dict[str, Tensor]  # [B, T] each, to be averaged over the mask


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float | None = 0.5
) -> ValueLoss:
    """½ max((V - G)², (V_c - G)²) with V_c = clip(V, V_old - c, V_old + c); without a clip range ½ (V - G)².

    `values` [B, T] are the predictions that are trained, `old_values` those of the rollout, `returns` the targets G.
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
