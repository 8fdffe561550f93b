"""Losses without a clipped ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.policy_losses.surrogate import PolicyLoss, finish, inside, log_ratio, safe_factor
from strop.algorithms.shapes import require_same_shape


def gpg(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, rollout_weights: Tensor | None = None
) -> PolicyLoss:
    """GPG (Chu et al. 2025), the plain policy gradient: l = -A log π. Of the old log-probs only the shape is looked at."""
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    (advantages,) = inside(mask, advantages=advantages)
    return finish(safe_factor(log_probs, mask) * -advantages, mask, rollout_weights)


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, rollout_weights: Tensor | None = None
) -> PolicyLoss:
    """REINFORCE (Williams 1992) that also reports how far the policy has moved: l = -A log π."""
    plain = gpg(log_probs, old_log_probs, advantages, mask, rollout_weights=rollout_weights)
    return finish(plain.per_token, mask, None, ppo_kl=-log_ratio(log_probs, old_log_probs, mask, limit=None))


def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    dro_beta: float,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """DRO (Richemond et al. 2024) with the advantage in place of reward minus value: l = -A log π + (β / 2) x²."""
    if dro_beta is None or not dro_beta > 0:
        raise ValueError(f"dro_beta is the strength of the pull towards the old policy and must be positive, got {dro_beta}.")
    plain = gpg(log_probs, old_log_probs, advantages, mask)
    x = log_ratio(log_probs, old_log_probs, mask, limit=None)
    loss = torch.addcmul(plain.per_token, x, x, value=0.5 * dro_beta)
    return finish(loss, mask, rollout_weights, ppo_kl=-x.detach())
