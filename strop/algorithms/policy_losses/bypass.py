"""Training directly against the policy that sampled, without a pass for the old log-probs."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.policy_losses.clipped import vanilla
from strop.algorithms.policy_losses.reinforce import reinforce
from strop.algorithms.policy_losses.surrogate import PolicyLoss
from strop.algorithms.rollout_correction import importance_weights, parse_band, rejection_mask
from strop.algorithms.shapes import require_same_shape

LOSS_TYPES = ("ppo_clip", "reinforce")


def bypass_mode(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
) -> PolicyLoss:
    """`old_log_probs` are those of the rollout engine, so d = log π - log π_rollout is corrected at every update.

    ppo_clip    the clipped surrogate against the rollout policy; its ratio is the importance weight, so no other is applied
    reinforce   l = -w(d) A log π with the importance weights of `rollout_correction`

    Tokens that `rollout_rs` rejects lose their loss and stay in the denominators. The metric `kept` is 1 where a token stayed.
    """
    require_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"rollout_correction.loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}.")
    d = log_probs.detach() - old_log_probs
    kept = mask
    if rollout_rs:
        kept, _ = rejection_mask(d, mask, criteria=rollout_rs, threshold=rollout_rs_threshold)
    if loss_type == "ppo_clip":
        loss = vanilla(log_probs, old_log_probs, advantages, kept, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)
    else:
        weights = None
        if rollout_is:
            band = parse_band(rollout_is_threshold)
            weights, _ = importance_weights(d, mask, level=rollout_is, normalize=rollout_is_batch_normalize, **band._asdict())
        loss = reinforce(log_probs, old_log_probs, advantages, kept, rollout_weights=weights)
    return PolicyLoss(loss.per_token, {**loss.metrics, "kept": kept.to(loss.per_token.dtype)})
