"""Proxies of the variance of the policy gradient."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.aggregation import masked_mean, masked_sum


def variance_proxy_metrics(
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    grad_norm: float | None = None,
    rollout_is_weights: Tensor | None = None,
) -> dict[str, float]:
    """Signal, total power and noise of the gradient, from quantities a step has anyway.

    w_t = 1 - 2π_t + Σ_v π_v² is the squared norm of the score of token t with respect to its logits, W a
    row's sum of it and A the row's mean advantage. Total power E[A² W] (a row's share floored at 0), signal
    |g|² of the step's mean gradient, noise (power - signal) / (rows - 1). Importance weights ρ scale the
    power by mean(ρ)², and E[W] by ρ_t² in its sum.
    """
    per_token = 1.0 - 2.0 * old_log_probs.exp() + sum_pi_squared
    row_advantage = masked_mean(advantages, response_mask, -1)
    power = row_advantage.square() * masked_sum(per_token, response_mask, -1)
    if rollout_is_weights is not None:
        power = power * masked_mean(rollout_is_weights, response_mask, -1).square()
        per_token = per_token * rollout_is_weights.square()
    total = power.clamp(min=0.0).mean().item()
    signal = 0.0 if grad_norm is None else grad_norm**2
    rows = len(response_mask)
    known = grad_norm is not None and rows > 1
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": total,
        "variance_proxy/proxy3_pure_noise": max(0.0, (total - signal) / (rows - 1)) if known else 0.0,
        "variance_proxy/expected_a_squared": row_advantage.square().mean().item(),
        "variance_proxy/expected_w": masked_sum(per_token, response_mask, -1).mean().item(),
    }
