"""What is added to a score before advantages are estimated: the price of leaving the reference, of length, of not stopping."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.kl import kl_penalty
from strop.algorithms.masked import Compat, masked_fill_zero, masked_mean
from strop.algorithms.reward_placement import place_terminal


class KLShaped(NamedTuple):
    """`rewards` [B, T]; `kl` is the mean over rows of each row's mean KL, what a controller is fed."""

    rewards: Tensor
    kl: float


def kl_in_reward(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, coef: float, estimator: str = "k1"
) -> KLShaped:
    """r_t = score_t - coef * KL_t on valid tokens; scores elsewhere stay as they are."""
    shapes = {tuple(t.shape) for t in (scores, log_probs, ref_log_probs, mask)}
    if len(shapes) > 1:
        raise ValueError(
            f"scores {tuple(scores.shape)}, log_probs {tuple(log_probs.shape)}, ref_log_probs {tuple(ref_log_probs.shape)} "
            f"and mask {tuple(mask.shape)} must have one shape [batch, tokens]."
        )
    kl = masked_fill_zero(kl_penalty(log_probs, ref_log_probs, estimator=estimator), mask)
    mean = masked_mean(kl, mask, dim=-1).mean() if len(kl) else kl.sum()
    return KLShaped(scores - coef * kl, float(mean))


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
        raise ValueError(f"kl {tuple(kl.shape)} and mask {tuple(mask.shape)} must have one shape [batch, tokens].")
    clipped = scores if clip_range is None else scores.clamp(*clip_range)
    charged = kl if compat == "openrlhf" else masked_fill_zero(kl, mask)
    return place_terminal(clipped, mask) - max(coef, 0.0) * charged


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0, capped: bool = False) -> Tensor:
    """DAPO's soft length penalty (Yu et al., 2025), to be added to the score: 0 up to max_length - buffer, then a line down.

    It reaches -factor at `max_length`; beyond it the line goes on (verl), or stays there with `capped` (OpenRLHF).
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"The overlong buffer must be in 1..max_length, got buffer={buffer} and max_length={max_length}.")
    excess = (lengths - (max_length - buffer)).clamp(min=0)
    excess = excess.clamp(max=buffer) if capped else excess
    return -factor * excess / buffer


def truncation_penalty(scores: Tensor, truncated: Tensor, *, coef: float) -> Tensor:
    """Scores of answers that were cut off: multiplied by a `coef` in [0, 1], or replaced by a negative one."""
    if scores.shape != truncated.shape:
        raise ValueError(f"scores {tuple(scores.shape)} and truncated {tuple(truncated.shape)} must have one shape.")
    if coef > 1:
        raise ValueError(
            f"coef must be in [0, 1] to scale the scores of cut-off answers, or negative to replace them, got {coef}."
        )
    punished = scores * coef if coef >= 0 else torch.full_like(scores, coef)
    return torch.where(truncated.bool(), punished, scores)
