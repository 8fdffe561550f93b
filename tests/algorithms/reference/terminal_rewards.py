"""Token rewards from one score per response, as OpenRLHF builds them."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.aggregation import Compat, masked_fill_zero


def terminal_rewards(
    scores: Tensor,
    kl: Tensor,
    mask: Tensor,
    *,
    coef: float,
    clip_range: tuple[float, float] | None = None,
    compat: Compat = None,
) -> Tensor:
    """r_t = -coef * KL_t, plus the score of the row, clipped to `clip_range`, on its last valid token.

    A negative `coef` counts as 0. `compat="openrlhf"` charges the KL on masked tokens too.
    """
    if kl.shape != mask.shape:
        raise ValueError(
            f"kl {tuple(kl.shape)} and mask {tuple(mask.shape)} must have one shape [batch, tokens]."
        )
    clipped = scores if clip_range is None else scores.clamp(*clip_range)
    charged = kl if compat == "openrlhf" else masked_fill_zero(kl, mask)
    return place_terminal(clipped, mask) - max(coef, 0.0) * charged


def place_terminal(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T] with `scores` [B] on the last valid token of each row, or on the last column if it
    has none."""
    if scores.dim() != 1 or mask.dim() != 2 or len(scores) != len(mask):
        raise ValueError(
            f"scores {tuple(scores.shape)} must hold one entry per row of mask {tuple(mask.shape)}."
        )
    placed = scores.new_zeros(mask.shape)
    return placed.scatter_(1, _last_valid(mask)[:, None], scores[:, None])


def _last_valid(mask: Tensor) -> Tensor:
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask.bool() * columns).amax(dim=1) - 1
    return last.where(last >= 0, mask.shape[1] - 1)
