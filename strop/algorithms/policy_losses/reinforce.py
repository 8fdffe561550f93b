"""Policy losses without a clipped ratio, and the loss of bypass mode."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.aggregation import require_same_shape
from strop.algorithms.policy_losses.clipped import PolicyLoss, finish, inside, log_ratio, safe_factor, vanilla
from strop.algorithms.rollout_correction import importance_weights, parse_band, rejection_tests


def gpg(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """GPG (Chu et al. 2025), the plain policy gradient: l = -A log π. Only the shape of the old log-probs is
    checked."""
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    (advantages,) = inside(mask, advantages=advantages)
    return finish(safe_factor(log_probs, mask) * -advantages, mask, rollout_weights)


def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """REINFORCE (Williams 1992): l = -A log π. It also reports the KL divergence from the old policy."""
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
    """DRO (Richemond et al. 2024) with the advantage in place of reward minus value: l = -A log π + (β / 2)
    x²."""
    if dro_beta is None or not dro_beta > 0:
        raise ValueError(
            "dro_beta is the strength of the regularisation towards the old policy and must be positive, got "
            f"{dro_beta}."
        )
    plain = gpg(log_probs, old_log_probs, advantages, mask)
    x = log_ratio(log_probs, old_log_probs, mask, limit=None)
    loss = torch.addcmul(plain.per_token, x, x, value=0.5 * dro_beta)
    return finish(loss, mask, rollout_weights, ppo_kl=-x.detach())


# --- Bypass mode: the engine's log-probs are the old log-probs ----------------------------------------------

LOSS_TYPES = ("ppo_clip", "reinforce")


def bypass_mode(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
) -> PolicyLoss:
    """Policy loss against the rollout policy: `old_log_probs` are the log-probs of the rollout engine.

    Every update corrects d = log π - log π_rollout. `loss_type` selects the loss:

    - ppo_clip: the clipped surrogate loss. Its ratio is the importance weight, so no other weight is applied.
    - reinforce: l = -w(d) A log π, with the importance weights of `rollout_correction`.

    Tokens that `rollout_rs` rejects have no loss but stay in the denominators. The metric `kept` is 1 for
    tokens that were not rejected; `rollout_corr/...` has verl's names of the criteria and the weights.
    """
    require_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    if loss_type not in LOSS_TYPES:
        raise ValueError(
            f"rollout_correction.loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}."
        )
    d = log_probs.detach() - old_log_probs
    kept = mask
    metrics: dict[str, Tensor] = {}
    if rollout_rs:
        for test in rejection_tests(d, mask, criteria=rollout_rs, threshold=rollout_rs_threshold):
            kept = kept * test.passes
            metrics[f"rollout_corr/rollout_rs_{test.name}_mean"] = test.value
        metrics["rollout_corr/rollout_rs_masked_fraction"] = (mask != kept).to(d.dtype)
    weights = None
    if rollout_is and rollout_is_threshold is not None:
        band = parse_band(rollout_is_threshold)
        weights, _ = importance_weights(
            d, mask, level=rollout_is, normalize=rollout_is_batch_normalize, **band._asdict()
        )
        metrics["rollout_corr/rollout_is_mean"] = weights
    if loss_type == "ppo_clip":
        loss = vanilla(
            log_probs, old_log_probs, advantages, kept, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c
        )
    else:
        loss = reinforce(log_probs, old_log_probs, advantages, kept, rollout_weights=weights)
    metrics["kept"] = kept.to(loss.per_token.dtype)
    return PolicyLoss(loss.per_token, {**loss.metrics, **metrics})
