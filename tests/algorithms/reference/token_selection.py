"""Which tokens or sequences take part in the policy loss at all. Every function returns a mask of zeros and
ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strop.algorithms.aggregation import masked_fill_zero, require_same_shape
from strop.algorithms.policy_losses.clipped import binary_kl, row_mean

GATES = ("ratio", "tv", "binary_kl")


def high_entropy_mask(entropy: Tensor, mask: Tensor, *, quantile: float) -> Tensor:
    """The tokens [B, T] whose entropy reaches the given quantile of all masked tokens ("Beyond the 80/20
    rule", 2025).

    `quantile=0.8` keeps the fifth of the tokens where the policy really decides.
    """
    require_same_shape(entropy=entropy, mask=mask)
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be between 0 and 1, got {quantile}.")
    on = mask.bool()
    values = entropy[on].float()
    if not values.numel():
        return on
    return on & (entropy >= _quantile(values, quantile))


def _quantile(values: Tensor, share: float) -> Tensor:
    """Linear between neighbours, as `torch.quantile`, which refuses more than 16 million numbers."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return torch.lerp(below, above, place - math.floor(place))


def off_policy_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, row_advantages: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Rows [B, 1] that stay (DeepSeek-V3.2): all with A >= 0, and bad ones while mean_t(log π_rollout - log
    π) <= threshold.

    A bad answer that the policy has long left teaches nothing and pushes hard. `row_advantages` is [B, 1].
    """
    require_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    drift = row_mean(masked_fill_zero(rollout_log_probs - log_probs.detach(), mask), mask)
    return (row_advantages >= 0) | (drift <= threshold)


def divergence_gate(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    kind: str = "ratio",
    level: str = "token",
    lower: float = 0.0,
    upper: float = 2.0,
) -> Tensor:
    """The tokens [B, T] whose train/rollout divergence lies in [lower, upper]; with level "sequence" the
    row's mean decides.

    ratio       π_train / π_rollout; for a row the geometric mean
    tv          |π_train - π_rollout| of the sampled token
    binary_kl   KL(rollout || train) of "this token or another"
    """
    require_same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    if kind not in GATES:
        raise ValueError(f"kind must be one of {', '.join(GATES)}, got {kind!r}.")
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}.")
    train, rollout = (masked_fill_zero(x.detach(), mask) for x in (old_log_probs, rollout_log_probs))
    if kind == "ratio":
        value = train - rollout
    elif kind == "tv":
        value = (train.exp() - rollout.exp()).abs()
    else:
        value = masked_fill_zero(binary_kl(rollout, train), mask)
    if level == "sequence":
        value = row_mean(value, mask).expand_as(value)
    if kind == "ratio":
        value = value.exp()
    return (value >= lower) & (value <= upper) & mask.bool()
