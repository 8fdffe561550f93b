"""Losses whose ratio belongs to the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.policy_losses.clipped import (
    PolicyLoss,
    at_level,
    finish,
    inside,
    log_of_weights,
    log_ratio,
    nowhere,
    require_clip_range,
    row_mean,
)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: str = "sequence_token",
    max_log_ratio: float = 10.0,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """GSPO (Zheng et al. 2025): s = exp(mean_t x), l = max(-A s, -A clip(s, 1 - low, 1 + high)).

    With the level "sequence_token" (GSPO-token) each token's gradient is weighted by its own advantage;
    "sequence" spreads the gradient of s evenly over the row. The two agree when the advantage is one number
    per row.
    """
    require_clip_range(clip_low, clip_high)
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask, limit=None)
    ratio = at_level(x, mask, level).clamp(max=max_log_ratio).exp()
    gain = -advantages
    plain, clipped = gain * ratio, gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    return finish(
        torch.maximum(plain, clipped),
        mask,
        rollout_weights,
        pg_clipfrac=clipped > plain,
        ppo_kl=-x.detach(),
        pg_clipfrac_lower=nowhere(plain),
    )


def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """GMPO (Zhao et al. 2025), the geometric mean of the ratios, clipped token by token in log space:

    x' = min(x, high) where A > 0, max(x, -low) where A < 0;   l = -mean_t(A) exp(mean_t x')   for every token
    of the row.

    The loss is one number per sequence, so the only reduction that gives it its meaning is
    seq-mean-token-mean. Rollout weights enter by their geometric mean too.
    """
    require_clip_range(clip_low, clip_high)
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask, limit=None)
    sign = advantages.sign()
    near = x.clamp(-clip_low, clip_high)
    kept = sign * torch.minimum(sign * x, sign * near)
    ratio = row_mean(kept, mask).exp()
    if rollout_weights is not None:
        log_weights = log_of_weights(rollout_weights.detach(), mask, least=1e-8)
        ratio = ratio * row_mean(log_weights * mask, mask).exp().to(ratio.dtype)
    per_row = -row_mean(advantages, mask) * ratio
    outside = near != x
    return finish(
        per_row * mask,
        mask,
        None,
        pg_clipfrac=outside & (advantages > 0),
        ppo_kl=-x.detach(),
        pg_clipfrac_lower=outside & (advantages < 0),
    )
