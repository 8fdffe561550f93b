"""PPO's clipped surrogate and its relatives that bound a divergence instead of the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.policy_losses.surrogate import (
    PolicyLoss,
    finish,
    inside,
    log_ratio,
    nowhere,
    require_clip_range,
    safe_factor,
)
from strop.algorithms.shapes import require_same_shape


def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    ratio_cap: float | None = None,
    level: str = "token",
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO-clip (Schulman et al. 2017) with separate sides (DAPO) and dual clip (Ye et al. 2020).

    l = max(-A r, -A clip(r, 1 - low, 1 + high)), and l = min(l, -A c) where A < 0 and `clip_c` is given.
    `ratio_cap` bounds r in the unclipped term for both signs of A (two-sided clipping); `level` is that of `log_ratio`.
    """
    require_clip_range(clip_low, clip_high)
    if clip_c is not None and not clip_c > 1:
        raise ValueError(f"clip_c (dual clip) bounds the ratio of bad tokens and must be greater than 1, got {clip_c}.")
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask, level=level)
    ratio = x.exp()
    capped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    gain = -advantages
    plain, clipped = gain * capped, gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    worst = torch.maximum(plain, clipped)
    beyond = (clipped if ratio_cap is None else gain * capped.clamp(1 - clip_low, 1 + clip_high)) > plain
    loss, bounded = worst, nowhere(beyond)
    if clip_c is not None:
        # |A| c is -A c for bad tokens, and out of reach of good ones, whose loss is not positive.
        bound = advantages.abs() * clip_c
        loss, bounded = torch.minimum(worst, bound), worst > bound
    return finish(loss, mask, rollout_weights, pg_clipfrac=beyond, ppo_kl=-x.detach(), pg_clipfrac_lower=bounded)


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 20.0,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """DPPO with the total variation of the sampled token, |π(a) - π_old(a)|, as trust region; see `_divergence_bounded`."""
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    moved = (log_probs.detach().exp() - old_log_probs.exp()).abs()
    return _divergence_bounded(
        log_probs, old_log_probs, advantages, mask, moved, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c,
        rollout_weights=rollout_weights,
    )  # fmt: skip


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 20.0,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """DPPO with the binary KL divergence of the sampled token against all others as trust region:
    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); see `_divergence_bounded`.
    """
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    moved = binary_kl(old_log_probs, log_probs.detach())
    return _divergence_bounded(
        log_probs, old_log_probs, advantages, mask, moved, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c,
        rollout_weights=rollout_weights,
    )  # fmt: skip


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of two coins that show the sampled token with probabilities p and q."""
    p, q = log_p.exp(), log_q.exp()
    rest_p, rest_q = (1 - p).clamp(min=1e-8), (1 - q).clamp(min=1e-8)
    return p * (log_p - log_q) + rest_p * (rest_p / rest_q).log()


def _divergence_bounded(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    moved: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    rollout_weights: Tensor | None,
) -> PolicyLoss:
    """l = -A sg(min(r, c)) log π for tokens inside the trust region, 0 for those that left it in the direction A pushes them.

    A token has left when A > 0, its probability rose and it moved by more than `clip_high`, or A <= 0, its probability fell and
    it moved by more than `clip_low`. `clip_c` truncates the ratio.
    """
    require_clip_range(clip_low, clip_high)
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask)
    rose_too_far = (advantages > 0) & (x > 0) & (moved > clip_high)
    fell_too_far = (advantages <= 0) & (x < 0) & (moved > clip_low)
    left = (rose_too_far | fell_too_far).detach()
    ratio = x.detach().exp()
    loss = (-advantages * ratio.clamp(max=clip_c)).masked_fill(left, 0.0) * safe_factor(log_probs, mask)
    truncated = (ratio > clip_c) & ~left
    return finish(loss, mask, rollout_weights, pg_clipfrac=left, ppo_kl=-x.detach(), pg_clipfrac_lower=truncated)
