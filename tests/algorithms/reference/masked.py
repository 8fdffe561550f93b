"""Operations over a mask that other frameworks have and Strop does not need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.algorithms.aggregation import EPS, masked_fill_zero


def masked_normalise(values: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Zero mean and unit population variance along one dimension, 0 outside the mask; an empty slice stays
    0."""
    count = mask.sum(dim, keepdim=True).clamp(min=1)
    kept = masked_fill_zero(values, mask)
    centred = masked_fill_zero(kept - kept.sum(dim, keepdim=True) / count, mask)
    return centred * (centred.square().sum(dim, keepdim=True) / count + EPS).rsqrt()


def clamp_between(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clamp to tensor bounds, the lower one winning where they cross (`torch.clamp` lets the upper one
    win)."""
    return torch.maximum(torch.minimum(values, high), low)


def mask_through_stop(token_ids: Tensor, stop_ids: int | Sequence[int]) -> Tensor:
    """1 up to and with the first stop token of each row, 0 after it; a row without one is all 1."""
    stops = torch.as_tensor(
        [stop_ids] if isinstance(stop_ids, int) else list(stop_ids), device=token_ids.device
    )
    stopped = torch.isin(token_ids, stops).long()
    return (stopped.cumsum(-1) - stopped == 0).long()
