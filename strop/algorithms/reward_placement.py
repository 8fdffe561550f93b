"""On which token a reward stands.

A score for a whole response belongs on its last *trainable* token. Agents often end on a token the policy did not write (tool
or user text, mask 0); a recursion that looks only at the mask would lose a score standing there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.masked import as_weights


def place_terminal(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T] with `scores` [B] on the last valid token of each row, or on the last column if it has none."""
    if scores.dim() != 1 or mask.dim() != 2 or len(scores) != len(mask):
        raise ValueError(f"scores {tuple(scores.shape)} must hold one entry per row of mask {tuple(mask.shape)}.")
    placed = scores.new_zeros(mask.shape)
    return placed.scatter_(1, _last_valid(mask)[:, None], scores[:, None])


def move_to_trainable(rewards: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Finite rewards moved so that none stands outside the mask; `weights` is the mask as numbers, if at hand.

    A reward on a masked position is added to the last valid token before it, or to the first one after it if there is none
    before. A row without valid tokens loses its rewards: there is nothing to train. Row sums of all other rows are kept. Where
    nothing is to be moved the rewards themselves come back, not a copy.
    """
    weights = as_weights(mask, rewards.dtype) if weights is None else weights
    stray = torch.addcmul(rewards, rewards, weights, value=-1)
    if not torch.linalg.vector_norm(stray):
        return rewards
    moved = rewards * weights
    rows = stray.abs().amax(dim=1).nonzero().squeeze(1)
    valid = mask[rows].bool()
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(valid)
    before = columns.masked_fill(~valid, -1).cummax(dim=1).values
    first = valid.long().argmax(dim=1, keepdim=True)
    target = torch.where(before >= 0, before, first)
    added = torch.zeros_like(moved[rows]).scatter_add_(1, target, stray[rows])
    moved[rows] += added.masked_fill(~valid, 0.0)
    return moved


def _last_valid(mask: Tensor) -> Tensor:
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask.bool() * columns).amax(dim=1) - 1
    return last.where(last >= 0, mask.shape[1] - 1)
