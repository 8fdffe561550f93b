"""Reward shaping before advantages are estimated: KL penalty, length penalty, truncation penalty, and rewards
moved to trainable tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import as_weights, masked_fill_zero, masked_mean
from strop.algorithms.kl import kl_limits, kl_penalty
from strop.compat import STROP, Conventions


class KLShaped(NamedTuple):
    """`rewards` [B, T]; `kl` is the mean over rows of each row's mean KL, the input of a KL controller."""

    rewards: Tensor
    kl: float


def kl_in_reward(
    scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    coef: float,
    estimator: str = "k1",
    rules: Conventions = STROP,
) -> KLShaped:
    """r_t = score_t - coef * KL_t on valid tokens; scores elsewhere stay. `rules` bound the KL."""
    shapes = {tuple(t.shape) for t in (scores, log_probs, ref_log_probs, mask)}
    if len(shapes) > 1:
        raise ValueError(
            f"scores {tuple(scores.shape)}, log_probs {tuple(log_probs.shape)}, ref_log_probs "
            f"{tuple(ref_log_probs.shape)} and mask {tuple(mask.shape)} must have one shape [batch, tokens]."
        )
    per_token = kl_penalty(log_probs, ref_log_probs, estimator=estimator, **kl_limits(estimator, rules))
    kl = masked_fill_zero(per_token, mask)
    mean = 0.0
    if len(kl):
        mean = float(masked_mean(kl, mask, dim=-1).mean())
    return KLShaped(scores - coef * kl, mean)


def overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0, capped: bool = False
) -> Tensor:
    """DAPO's soft length penalty (Yu et al., 2025), to be added to the score: 0 up to max_length - buffer,
    then a line down.

    It reaches -factor at `max_length`; beyond it the line goes on (verl), or stays there with `capped`
    (OpenRLHF).
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"The overlong buffer must be in 1..max_length, got buffer={buffer} and max_length={max_length}."
        )
    excess = (lengths - (max_length - buffer)).clamp(min=0)
    if capped:
        excess = excess.clamp(max=buffer)
    return -factor * excess / buffer


def truncation_penalty(scores: Tensor, truncated: Tensor, *, coef: float) -> Tensor:
    """Scores in which those of truncated responses are multiplied by a `coef` in [0, 1], or replaced by a
    negative `coef`."""
    if scores.shape != truncated.shape:
        raise ValueError(
            f"scores {tuple(scores.shape)} and truncated {tuple(truncated.shape)} must have one shape."
        )
    if coef > 1:
        raise ValueError(
            "coef must be in [0, 1] to scale the scores of cut-off answers, or negative to replace them, got "
            f"{coef}."
        )
    penalised = torch.full_like(scores, coef)
    if coef >= 0:
        penalised = scores * coef
    return torch.where(truncated.bool(), penalised, scores)


def on_last_trained(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T] with the scores [B] on the last trained token of each row. A row without trained
    tokens gets none: it is not trained."""
    if scores.dim() != 1 or mask.dim() != 2 or len(scores) != len(mask):
        raise ValueError(
            f"scores {tuple(scores.shape)} must hold one entry per row of mask {tuple(mask.shape)}."
        )
    placed = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if not mask.shape[1]:
        return placed
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask.bool() * columns).amax(dim=1)
    return placed.scatter_(1, (last - 1).clamp(min=0)[:, None], (scores * (last > 0))[:, None])


def move_to_trainable(rewards: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Finite rewards, moved so that none is outside the mask; `weights` is the mask as numbers, if the caller
    has it.

    Trajectories of agents often end on a token that the policy did not generate (tool or user text, mask 0),
    and a recursion over the mask would lose a score there. A reward on a masked position is added to the last
    valid token before it, or to the first one after it if there is none before. A row without valid tokens
    loses its rewards, since it is not trained. Row sums of all other rows are kept. If nothing has to be
    moved, the rewards themselves are returned, not a copy.
    """
    if weights is None:
        weights = as_weights(mask, rewards.dtype)
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
