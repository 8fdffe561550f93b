"""Rollout correction: training on tokens that were sampled by a slightly different policy.

The engine and the trainer compute slightly different probabilities for the same weights (kernels, precision),
and the engine's weights may be older. With d = log π_train - log π_rollout per token, there are two
corrections, which can be combined:

- importance weights exp(d), truncated (TIS) or zeroed outside a band (IcePop), per token or as the product
  over the sequence;
- rejection: tokens or whole sequences whose divergence is outside a band are removed from the mask.

Both are constants for the gradient. `PRESETS` names common combinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import masked_fill_zero, require_same_shape
from strop.algorithms.rollout_diagnostics import (
    LIMIT,
    Metrics,
    mismatch_metrics,
    rejection_metrics,
    token_mean,
    weight_metrics,
)
from strop.registry import did_you_mean

CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


class Correction(NamedTuple):
    """The result of rollout correction."""

    weights: Tensor | None  # [B, T] for the `rollout_weights` of a policy loss; None without rollout_is
    mask: Tensor  # [B, T] the mask without rejected tokens
    metrics: Metrics  # rollout_corr/..., one number each


class Band(NamedTuple):
    """The range of importance weights."""

    lower: float
    upper: float
    outside: str  # what happens to a weight outside the band: "clip" or "zero"


def parse_band(threshold: float | str) -> Band:
    """`2.0` truncates above, `"0.5_2.0"` zeroes outside.

    >>> parse_band("0.5_2.0")
    Band(lower=0.5, upper=2.0, outside='zero')
    """
    numbers = _numbers("rollout_is_threshold", threshold)
    if len(numbers) == 1:
        return Band(0.0, numbers[0], "clip")
    return Band(numbers[0], numbers[1], "zero")


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    lower: float = 0.0,
    upper: float = 2.0,
    outside: str = "clip",
    normalize: bool = False,
) -> tuple[Tensor, Metrics]:
    """w = exp(d) per token, or exp(Σ_t d_t) for every token of a sequence; zero outside the mask.

    `outside` says what happens beyond [lower, upper]: "clip" truncates (TIS), "zero" drops the token
    (IcePop). `normalize` divides by the mean weight, over tokens or over sequences, after that.
    """
    require_same_shape(log_ratio=log_ratio, mask=mask)
    if level not in ("token", "sequence"):
        raise ValueError(
            f"rollout_is must be 'token' or 'sequence', got {level!r}. Geometric means are a rejection "
            "criterion."
        )
    if outside not in ("clip", "zero"):
        raise ValueError(f"outside must be 'clip' or 'zero', got {outside!r}.")
    d = masked_fill_zero(log_ratio.detach(), mask)
    weights = _weights(d, mask, level, Band(lower, upper, outside))
    low = lower
    if outside == "clip":
        low = lower or 1 / upper
    metrics = weight_metrics(d, mask, weights, level=level, lower=low, upper=upper)
    if outside == "zero":
        metrics["rollout_is_oob_ratio"] = token_mean((weights == 0).float(), mask)
    if normalize:
        centre = metrics["rollout_is_seq_mean" if level == "sequence" else "rollout_is_mean"]
        metrics["rollout_is_batch_norm_factor"] = centre
        weights = torch.where(centre > 0, weights / centre.clamp(min=1e-8), weights)
    return weights, metrics


def weights_of_rows(log_ratio: Tensor, mask: Tensor, *, level: str, threshold: float | str) -> Tensor:
    """The weights of `importance_weights` without its checks and metrics: for some rows of a batch."""
    return _weights(masked_fill_zero(log_ratio.detach(), mask), mask, level, parse_band(threshold))


def _weights(d: Tensor, mask: Tensor, level: str, band: Band) -> Tensor:
    total = d
    if level == "sequence":
        total = d.sum(-1, keepdim=True).expand_as(d)
    ratio = total.clamp(-LIMIT, LIMIT).exp()
    if band.outside == "clip":
        return masked_fill_zero(ratio.clamp(band.lower, band.upper), mask)
    return masked_fill_zero(ratio, mask.bool() & ((ratio >= band.lower) & (ratio <= band.upper)))


class RejectionTest(NamedTuple):
    """One criterion of rejection, applied to every token [B, T]."""

    name: str
    value: Tensor
    passes: Tensor
    lower: float | None
    upper: float


def rejection_tests(
    log_ratio: Tensor, mask: Tensor, *, criteria: str, threshold: float | str | None
) -> Iterator[RejectionTest]:
    """The criteria of `rejection_mask`, one by one."""
    require_same_shape(log_ratio=log_ratio, mask=mask)
    d = masked_fill_zero(log_ratio.detach(), mask).clamp(-LIMIT, LIMIT)
    for name, lower, upper in parse_criteria(criteria, threshold):
        scope, _, kind = name.rpartition("_")
        value = _statistic(d, mask.bool(), scope, kind)
        passes = value <= upper
        if lower is not None:
            passes &= value >= lower
        yield RejectionTest(name, value, passes, lower, upper)


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, *, criteria: str, threshold: float | str | None
) -> tuple[Tensor, Metrics]:
    """The mask without what any criterion rejects. `criteria` and `threshold` are comma lists; one threshold
    serves all.

    token_*: each token by its own value; seq_sum_*, seq_mean_*, seq_max_*: the whole row. Values: k1 = -d,
    kept while log(lo) <= k1 <= log(hi) for a ratio band "lo_hi" (one number u means "1/u_u"), so the band
    bounds π_rollout / π_train; k2 = d² / 2 and k3 = exp(d) - 1 - d, kept up to the threshold.
    """
    on = mask.bool()
    kept = on.clone()
    metrics: Metrics = {}
    for test in rejection_tests(log_ratio, mask, criteria=criteria, threshold=threshold):
        metrics |= rejection_metrics(
            test.name, test.value, mask, test.passes, lower=test.lower, upper=test.upper
        )
        kept &= test.passes
    rejected = on & ~kept
    metrics["rollout_rs_masked_fraction"] = rejected.count_nonzero() / on.count_nonzero().clamp(min=1)
    metrics["rollout_rs_seq_masked_fraction"] = rejected.any(-1).count_nonzero() / max(len(mask), 1)
    return kept.to(mask.dtype), metrics


def parse_criteria(criteria: str, threshold: float | str | None) -> list[tuple[str, float | None, float]]:
    """(name, lower, upper) per criterion, the bounds in the units of its statistic.

    >>> parse_criteria("token_k3", 0.1)
    [('token_k3', None, 0.1)]
    """
    names = list(dict.fromkeys(part.strip() for part in criteria.split(",") if part.strip()))
    if threshold is None:
        raise ValueError(f"rollout_rs={criteria!r} needs rollout_rs_threshold: a number, or 'lo_hi' for k1.")
    limits: list[float | str] = [threshold]
    if isinstance(threshold, str):
        limits = [*threshold.split(",")]
    if len(limits) == 1:
        limits = limits * len(names)
    if len(limits) != len(names):
        raise ValueError(
            f"rollout_rs_threshold has {len(limits)} values but rollout_rs names {len(names)} criteria: "
            f"{names}."
        )
    return [_criterion(name, limit) for name, limit in zip(names, limits)]


def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Correction:
    """Weights and mask for the whole batch of a step, with all metrics. Without `rollout_is` and `rollout_rs`
    only the metrics are computed. A threshold of None turns `rollout_is` off, and criteria without a name
    reject nothing."""
    require_same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    if not bool(mask.any()):
        raise ValueError(
            f"mask (shape {tuple(mask.shape)}) has no trained token, so there is no rollout to correct."
        )
    log_ratio = old_log_probs.detach() - rollout_log_probs.detach()
    weights = None
    kept = mask
    metrics: Metrics = {}
    if rollout_is and rollout_is_threshold is not None:
        band = parse_band(rollout_is_threshold)
        weights, found = importance_weights(
            log_ratio, mask, level=rollout_is, normalize=rollout_is_batch_normalize, **band._asdict()
        )
        metrics |= found
    if rollout_rs and rollout_rs.strip(", "):
        kept, found = rejection_mask(log_ratio, mask, criteria=rollout_rs, threshold=rollout_rs_threshold)
        metrics |= found
    metrics |= mismatch_metrics(old_log_probs, rollout_log_probs, mask)
    return Correction(weights, kept, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def _statistic(d: Tensor, on: Tensor, scope: str, kind: str) -> Tensor:
    """The value of a criterion for every token [B, T]."""
    values = {"k1": -d, "k2": 0.5 * d.square(), "k3": d.exp() - 1 - d}[kind]
    if scope == "token":
        return values
    if scope == "seq_sum":
        rows = values.sum(-1, keepdim=True)
    elif scope == "seq_mean":
        rows = values.sum(-1, keepdim=True) / on.sum(-1, keepdim=True).clamp(min=1)
    else:
        rows = values.amax(-1, keepdim=True)
    return rows.expand_as(values)


def _criterion(name: str, limit: float | str) -> tuple[str, float | None, float]:
    if name not in CRITERIA:
        raise ValueError(
            f"Unknown rollout_rs criterion {name!r}.{did_you_mean(name, CRITERIA)} Known: "
            f"{', '.join(CRITERIA)}."
        )
    numbers = _numbers(f"rollout_rs_threshold of {name}", limit)
    if name.endswith("k1"):
        if len(numbers) == 1 and numbers[0] < 1:
            raise ValueError(
                f"rollout_rs_threshold of {name} is the upper bound of a ratio, from 1 on: with {limit!r}, "
                f"which stands for '{1 / numbers[0]:g}_{numbers[0]:g}', every token would be rejected. Give "
                f"{1 / numbers[0]:g}, or a band 'lo_hi'."
            )
        if len(numbers) == 1:
            numbers = [1 / numbers[0], numbers[0]]
        return name, math.log(numbers[0]), math.log(numbers[1])
    if len(numbers) == 2:
        raise ValueError(
            f"rollout_rs_threshold of {name} is one upper bound, got the band {limit!r}; bands are for k1."
        )
    return name, None, numbers[0]


def _numbers(what: str, value: float | str) -> list[float]:
    """One positive number, or the two numbers of "lo_hi" in ascending order."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{what} must be a number or 'lo_hi', got {value!r}.")
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        raise ValueError(f"{what} must be a number or 'lo_hi', got {value!r}.") from None
    if len(numbers) > 2 or any(not n > 0 for n in numbers) or numbers != sorted(numbers):
        raise ValueError(f"{what} must be a positive number, or 'lo_hi' with 0 < lo <= hi; got {value!r}.")
    return numbers


# --- presets ------------------------------------------------------------------------------------------------


def _decoupled(**settings: float | str) -> dict[str, float | str]:
    return {"bypass_mode": False, **settings}


def _bypass(loss_type: str, **settings: float | str) -> dict[str, float | str]:
    return {"bypass_mode": True, "loss_type": loss_type, **settings}


_TOKEN_TIS: dict[str, float | str] = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_TIS: dict[str, float | str] = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_GEO_RS: dict[str, float | str] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS: dict[str, float | str] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}

PRESETS: dict[str, dict[str, float | str]] = {
    "disabled": _decoupled(),
    "decoupled_token_is": _decoupled(**_TOKEN_TIS),
    "decoupled_seq_is": _decoupled(**_SEQ_TIS),
    "decoupled_seq_is_rs": _decoupled(**_SEQ_TIS, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"),
    "decoupled_geo_rs": _decoupled(**_GEO_RS),
    "decoupled_geo_rs_seq_tis": _decoupled(**_GEO_RS, **_SEQ_TIS),
    "decoupled_geo_rs_token_tis": _decoupled(**_GEO_RS, **_TOKEN_TIS),
    "decoupled_k3_rs": _decoupled(**_K3_RS),
    "decoupled_k3_rs_seq_tis": _decoupled(**_K3_RS, **_SEQ_TIS),
    "decoupled_k3_rs_token_tis": _decoupled(**_K3_RS, **_TOKEN_TIS),
    "bypass_ppo_clip": _bypass("ppo_clip"),
    "bypass_ppo_clip_geo_rs": _bypass("ppo_clip", **_GEO_RS),
    "bypass_ppo_clip_k3_rs": _bypass("ppo_clip", **_K3_RS),
    "bypass_pg_is": _bypass("reinforce", **_SEQ_TIS),
    "bypass_pg_geo_rs": _bypass("reinforce", **_GEO_RS),
    "bypass_pg_geo_rs_seq_tis": _bypass("reinforce", **_GEO_RS, **_SEQ_TIS),
    "bypass_pg_geo_rs_token_tis": _bypass("reinforce", **_GEO_RS, **_TOKEN_TIS),
    "icepop": _decoupled(rollout_is="token", rollout_is_threshold="0.5_5.0"),
    "seq_mask_tis": _decoupled(
        rollout_is="token",
        rollout_is_threshold=math.inf,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.2_2.0",
    ),
}
