"""Which samples are trained on: filters over groups, and resampling."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.advantages.base import group_is_constant, group_mean, group_size


def groups_that_disagree(metric: Tensor, groups: Tensor) -> Tensor:
    """DAPO's dynamic sampling: True [B] for samples of groups whose metric is not the same for all members.

    Equal scores give advantage 0 and no gradient. A group of one is kept.
    """
    _check_rows(metric, groups)
    return (~group_is_constant(metric, groups) | (group_size(groups) == 1))[groups]


def groups_within(metric: Tensor, groups: Tensor, *, low: float, high: float) -> Tensor:
    """True [B] for samples of groups whose mean metric lies strictly between `low` and `high` (OpenRLHF)."""
    _check_rows(metric, groups)
    if low >= high:
        raise ValueError(f"low must be below high, got {low} and {high}.")
    mean = group_mean(metric.double(), groups)
    return ((mean > low) & (mean < high))[groups]


def pf_ppo_weights(
    scores: Tensor, *, method: Literal["pow", "max_min", "max_random"] = "pow", power: float = 2.0
) -> Tensor:
    """Sampling weights [B] of policy-filtration PPO (Zhang et al., 2024), each plus 1e-8.

    - "pow": |s|^power
    - "max_min": 1 for the best and worst scores, 0 for the others
    - "max_random": 0.4 for the best scores, 0.1 for the others
    """
    if method == "pow":
        weights = scores.abs().pow(power)
    elif method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    elif method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)
    else:
        raise ValueError(
            f"The PF-PPO reweight_method must be 'pow', 'max_min' or 'max_random', got {method!r}."
        )
    return weights + 1e-8


def resample_rows(weights: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """As many row indices as there are weights, drawn with replacement."""
    valid = weights.dim() == 1 and bool(torch.isfinite(weights).all() & (weights >= 0).all())
    if not valid or not (weights > 0).any():
        raise ValueError(
            f"weights {tuple(weights.shape)} must be one finite, non-negative number per row, not all zero."
        )
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)


def _check_rows(metric: Tensor, groups: Tensor) -> None:
    if metric.dim() != 1 or metric.shape != groups.shape:
        raise ValueError(
            f"metric {tuple(metric.shape)} and groups {tuple(groups.shape)} must both hold one entry per "
            "sample."
        )
