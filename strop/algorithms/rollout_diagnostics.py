"""Metrics of the mismatch between the rollout engine and the trained model.

All functions take the log-ratio d = log π_train - log π_rollout or its parts, use only tokens in the mask,
and never divide by zero: a metric that cannot be computed is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.aggregation import masked_fill_zero, require_same_shape

LIMIT = 20.0  # of a log-ratio before exp
Metrics = dict[str, Tensor]


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens in the mask."""
    return masked_fill_zero(values, mask).sum() / mask.sum().clamp(min=1)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row that has tokens; rows without are left out."""
    lengths = mask.sum(-1)
    return (masked_fill_zero(values, mask).sum(-1) / lengths.clamp(min=1))[lengths > 0]


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of each row that has tokens."""
    return masked_fill_zero(values, mask).sum(-1)[mask.sum(-1) > 0]


def _mean(values: Tensor) -> Tensor:
    if not values.numel():
        return values.new_zeros(())
    return values.mean()


def _largest(values: Tensor) -> Tensor:
    if not values.numel():
        return values.new_zeros(())
    return values.max()


def _smallest(values: Tensor) -> Tensor:
    if not values.numel():
        return values.new_zeros(())
    return values.min()


def _spread(values: Tensor) -> Tensor:
    """Standard deviation."""
    if values.numel() < 2:
        return values.new_zeros(())
    return values.std()


def _rate(flags: Tensor) -> Tensor:
    return flags.count_nonzero() / max(flags.numel(), 1)


def _token_rate(flags: Tensor, on: Tensor) -> Tensor:
    return (flags & on).count_nonzero() / on.count_nonzero().clamp(min=1)


def _token_extremes(values: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
    """Largest and smallest value over the mask. Indexing by the mask would be much slower."""
    if not bool(on.any()):
        return values.new_zeros(()), values.new_zeros(())
    return values.masked_fill(~on, -torch.inf).max(), values.masked_fill(~on, torch.inf).min()


def _token_spread(values: Tensor, mask: Tensor) -> Tensor:
    centre = token_mean(values, mask)
    return token_mean((values - centre).square(), mask).sqrt()


def weight_metrics(
    log_ratio: Tensor, mask: Tensor, weights: Tensor, *, level: str, lower: float, upper: float
) -> Metrics:
    """Metrics of importance weights after truncation and before normalisation; `upper` and `lower` are the
    bounds whose violations are counted.

    eff_sample_size = (mean w)² / mean w², in (0, 1]: the effective share of the tokens; 0 if all weights
    are 0.
    """
    rows = row_means(weights, mask)
    if level == "token":
        on = mask.bool()
        ratio = log_ratio.clamp(-LIMIT, LIMIT).exp()
        raw_rows = row_means(ratio, mask)
        largest, smallest = _token_extremes(weights, on)
        high = _token_rate(ratio > upper, on)
        low = _token_rate(ratio < lower, on)
    else:
        raw_rows = row_sums(log_ratio, mask).clamp(max=LIMIT).exp()
        largest = _largest(raw_rows)
        smallest = _smallest(raw_rows)
        high = _rate(raw_rows > upper)
        low = _rate(raw_rows < lower)
    mean = token_mean(weights, mask)
    square = token_mean(weights.square(), mask)
    return {
        "rollout_is_mean": mean,
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_std": _token_spread(weights, mask),
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        "rollout_is_eff_sample_size": torch.where(square > 0, mean.square() / square.clamp(min=1e-30), 0.0),
        "rollout_is_seq_mean": _mean(rows),
        "rollout_is_seq_std": _spread(rows),
        "rollout_is_seq_max": _largest(rows),
        "rollout_is_seq_min": _smallest(rows),
        "rollout_is_seq_max_deviation": _largest((rows - 1).abs()),
        "rollout_is_seq_fraction_high": _rate(raw_rows > upper),
        "rollout_is_seq_fraction_low": _rate(raw_rows < lower),
    }


def rejection_metrics(
    name: str, statistic: Tensor, mask: Tensor, kept: Tensor, *, lower: float | None, upper: float
) -> Metrics:
    """Metrics of one rejection criterion: its statistic [B, T] over the mask, and the share of tokens and
    rows that it rejects.

    The standard deviation is that of the statistic clamped to its bounds, so that one outlier does not
    dominate it.
    """
    on = mask.bool()
    rows = row_means(statistic, mask)
    floor = lower or 0.0
    largest, smallest = _token_extremes(statistic, on)
    if name.startswith("token"):
        high = _token_rate(statistic > upper, on)
        low = _token_rate(statistic < floor, on)
    else:
        high = _rate(rows > upper)
        low = _rate(rows < floor)
    rejected = on & ~kept
    found = {
        "mean": token_mean(statistic, mask),
        "max": largest,
        "min": smallest,
        "std": _token_spread(statistic.clamp(floor, upper), mask),
        "fraction_high": high,
        "fraction_low": low,
        "seq_mean": _mean(rows),
        "seq_std": _spread(rows),
        "seq_max": _largest(rows),
        "seq_min": _smallest(rows),
        "seq_max_deviation": _largest(rows.abs()),
        "seq_fraction_high": _rate(rows > upper),
        "masked_fraction": _token_rate(rejected, on),
        "seq_masked_fraction": rejected.any(-1).count_nonzero() / on.any(-1).count_nonzero().clamp(min=1),
    }
    if lower is not None:
        found["seq_fraction_low"] = _rate(rows < lower)
    return {f"rollout_rs_{name}_{key}": value for key, value in found.items()}


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor | None, mask: Tensor) -> Metrics:
    """Perplexities of both policies, KL(rollout || train) by two estimators, and the χ² divergence that
    bounds the variance of importance weights, per token and per sequence.
    """
    require_same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    old_log_probs = old_log_probs.detach()
    train = -row_means(old_log_probs, mask)
    found = {"training_ppl": _mean(train.exp()), "training_log_ppl": _mean(train)}
    if rollout_log_probs is None:
        return found
    d = masked_fill_zero(old_log_probs - rollout_log_probs, mask)
    rollout = -row_means(rollout_log_probs, mask)
    difference = train - rollout
    limited = d.clamp(-LIMIT, LIMIT)
    return found | {
        "kl": token_mean(-d, mask),
        "k3_kl": token_mean(limited.exp() - limited - 1, mask),
        "rollout_ppl": _mean(rollout.exp()),
        "rollout_log_ppl": _mean(rollout),
        "log_ppl_diff": _mean(difference),
        "log_ppl_abs_diff": _mean(difference.abs()),
        "log_ppl_diff_max": _largest(difference),
        "log_ppl_diff_min": _smallest(difference),
        "ppl_ratio": _mean(difference.exp()),
        "chi2_token": token_mean(limited.exp().square(), mask) - 1,
        "chi2_seq": _mean(row_sums(d, mask).clamp(-LIMIT, LIMIT).exp().square()) - 1,
    }
