"""Losses that keep the entropy high by restricting the tokens that reduce it (Cui et al. 2025).

A token lowers the entropy when its advantage and its log-prob are both above average, so tokens are ranked by
the product

    cov_t = (A_t - mean A) (log π_t - mean log π)

The means and the selection are computed over the given tensors. That is the published definition. These two
losses are therefore the only ones that depend on how a batch is split into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.aggregation import masked_mean
from strop.algorithms.policy_losses.clipped import PolicyLoss, finish, inside, log_ratio, require_clip_range
from strop.config.schema.actor import PolicyLossConfig


def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """cov_t as above, without gradient; -inf outside the mask."""
    log_probs = log_probs.detach()
    advantages = advantages.detach()
    product = (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))
    return product.masked_fill(~mask.bool(), -torch.inf)


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_cov_ratio: float = PolicyLossConfig.clip_cov_ratio,
    clip_cov_lb: float = PolicyLossConfig.clip_cov_lb,
    clip_cov_ub: float = PolicyLossConfig.clip_cov_ub,
    generator: torch.Generator | None = None,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """Clip-Cov: of the tokens with lb < cov < ub that PPO has not clipped, a random share `clip_cov_ratio` of
    all tokens (at least one) gets no loss; all others get max(-A r, -A clip(r, 1 - low, 1 + high)).
    """
    require_clip_range(clip_low, clip_high)
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask)
    ratio = x.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    cov = covariance(log_probs, advantages, mask).masked_fill(clipped > plain, -torch.inf)
    candidates = ((cov > clip_cov_lb) & (cov < clip_cov_ub)).flatten().nonzero().squeeze(-1)
    drop_count = max(int(clip_cov_ratio * int(mask.sum())), 1)
    order = torch.randperm(len(candidates), generator=generator)[:drop_count].to(candidates.device)
    dropped = torch.zeros_like(cov, dtype=torch.bool)
    dropped.view(-1)[candidates[order]] = True
    loss = torch.maximum(plain, clipped).masked_fill(dropped, 0.0)
    return finish(loss, mask, rollout_weights, pg_clipfrac=dropped, ppo_kl=-x.detach())


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kl_cov_ratio: float = PolicyLossConfig.kl_cov_ratio,
    ppo_kl_coef: float = PolicyLossConfig.ppo_kl_coef,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """KL-Cov: l = -A r, plus coef |x| for the share `kl_cov_ratio` of tokens (at least one) with the highest
    covariance."""
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask)
    restrained = torch.zeros_like(x, dtype=torch.bool)
    trained = mask.flatten().nonzero().squeeze(-1)
    if len(trained):
        cov = covariance(log_probs, advantages, mask).flatten()[trained]
        restrained.view(-1)[trained[cov.topk(max(1, int(len(trained) * kl_cov_ratio))).indices]] = True
    loss = -advantages * x.exp() + (ppo_kl_coef * x.abs()).masked_fill(~restrained, 0.0)
    return finish(loss, mask, rollout_weights, ppo_kl=x.abs())
