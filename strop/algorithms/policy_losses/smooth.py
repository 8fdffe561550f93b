"""Losses that fade a token's weight out instead of cutting its gradient off."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strop.algorithms.policy_losses.clipped import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    finish,
    inside,
    log_of_weights,
    log_ratio,
    nowhere,
    row_mean,
    safe_factor,
    sign_choice,
)

SMALLEST_WEIGHT = 1e-8
"""Of a sequence in vespo, and of a rollout weight in it."""


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: str = "token",
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """CISPO (MiniMax-M1, 2025): l = -sg(clip(r, 1 - low, 1 + high)) A log π. Clipped tokens keep a gradient.

    The range need not contain 1: it bounds a weight, not a step.
    """
    if clip_low + clip_high < 0:
        raise ValueError(
            f"The clip range [1 - clip_low, 1 + clip_high] is empty: clip_low={clip_low}, "
            f"clip_high={clip_high}."
        )
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask, level=level).detach()
    ratio = x.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = (-weight * advantages) * safe_factor(log_probs, mask)
    return finish(
        loss,
        mask,
        rollout_weights,
        pg_clipfrac=weight != ratio,
        ppo_kl=-x.detach(),
        pg_clipfrac_lower=nowhere(x),
    )


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    level: str = "token",
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """SAPO (Gao et al. 2025): l = -A (4 / τ) sigmoid(τ (r - 1)), τ = τ_pos where A > 0 and τ_neg elsewhere.

    A soft gate with slope 1 at r = 1 takes the place of the clip range.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(
            f"tau_pos and tau_neg are temperatures and must be positive, got {tau_pos} and {tau_neg}."
        )
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask, level=level)
    tau = sign_choice(advantages, tau_pos, tau_neg)
    gate = (tau * (x.exp() - 1)).sigmoid()
    loss = gate * (advantages * (-4 / tau))
    return finish(
        loss, mask, rollout_weights, pg_clipfrac=nowhere(x), ppo_kl=-x.detach(), pg_clipfrac_lower=nowhere(x)
    )


def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """VESPO: l = -φ(w) A log π with the sequence weight of `gamma_weights`, a constant for the gradient."""
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask)
    weight = gamma_weights(
        x,
        row_mean(advantages, mask),
        mask,
        k_pos=k_pos,
        lambda_pos=lambda_pos,
        k_neg=k_neg,
        lambda_neg=lambda_neg,
        rollout_weights=rollout_weights,
    )
    return finish(
        (-weight * advantages) * safe_factor(log_probs, mask),
        mask,
        None,
        ppo_kl=-x.detach(),
        phi=weight.expand_as(x),
    )


def gamma_weights(
    log_ratios: Tensor,
    row_advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    rollout_weights: Tensor | None = None,
) -> Tensor:
    """φ(w) = w^k exp(λ (1 - w)) as [B, 1], with w = exp(Σ_t x_t) Π_t rollout_weight_t.

    k and λ are chosen by the sign of `row_advantages` [B, 1]. φ(1) = 1, and φ falls to 0 when the sequence
    becomes far more or far less likely than it was.
    """
    per_token = log_ratios.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if rollout_weights is not None:
        log_weights = log_of_weights(rollout_weights, mask, least=SMALLEST_WEIGHT)
        per_token = per_token + log_weights.clamp(max=LOG_RATIO_LIMIT)
    log_w = (per_token * mask).sum(-1, keepdim=True).clamp(math.log(SMALLEST_WEIGHT), LOG_RATIO_LIMIT)
    positive = row_advantages >= 0
    k = torch.where(positive, k_pos, k_neg)
    rate = torch.where(positive, lambda_pos, lambda_neg)
    return (k * log_w + rate * (1 - log_w.exp())).exp().to(log_ratios.dtype)
