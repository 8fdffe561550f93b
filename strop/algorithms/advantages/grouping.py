"""Which samples answer the same prompt, and what their scores have in common.

Everything here is a scatter over the batch; no function loops over samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class GroupStatistics(NamedTuple):
    """Per group, indexed by group id. An id that no sample has counts 0."""

    mean: Tensor
    std: Tensor
    size: Tensor


def group_ids(uids: Sequence[Any] | np.ndarray | Tensor, *, compact: bool = True) -> Tensor:
    """Group ids [B] from prompt uids of any kind: equal uid, equal id; ids follow the sorted order of the uids.

    With `compact=False` integer uids are taken as the ids they are, gaps included.
    """
    labels = uids.detach().cpu().numpy() if isinstance(uids, Tensor) else np.asarray(uids)
    if labels.ndim != 1:
        raise ValueError(f"uids must be one label per sample, shape (batch,), got shape {labels.shape}.")
    if labels.dtype == object:
        labels = np.asarray(labels.tolist()) if all(isinstance(label, int) for label in labels) else labels.astype(str)
    if not compact and np.issubdtype(labels.dtype, np.integer):
        return torch.as_tensor(labels.astype(np.int64))
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1].astype(np.int64))


def group_sum(values: Tensor, groups: Tensor, count: int | None = None) -> Tensor:
    """Sum per group of [B] or [B, ...]."""
    count = _group_count(groups) if count is None else count
    return values.new_zeros((count, *values.shape[1:])).index_add_(0, groups, values)


def group_size(groups: Tensor) -> Tensor:
    return torch.bincount(groups)


def group_mean(scores: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """(Weighted) mean per group. Weights that add up to 0 give 0."""
    if weights is None:
        return group_sum(scores, groups) / group_size(groups).clamp(min=1)
    total = group_sum(weights, groups)
    return group_sum(scores * weights, groups) / total.where(total != 0, 1.0)


def group_max(scores: Tensor, groups: Tensor) -> Tensor:
    """Largest score per group; -inf for an id that no sample has."""
    return scores.new_full((_group_count(groups),), -torch.inf).scatter_reduce(0, groups, scores, "amax")


def group_second(scores: Tensor, groups: Tensor) -> Tensor:
    """Second largest score per group, equal to the largest if two share it; -inf in a group of one."""
    best = group_max(scores, groups)
    is_best = scores == best[groups]
    tied = group_sum(is_best.long(), groups) > 1
    return torch.where(tied, best, group_max(scores.masked_fill(is_best, -torch.inf), groups))


def group_is_constant(scores: Tensor, groups: Tensor) -> Tensor:
    """Per group: every sample has exactly the same score."""
    return group_max(scores, groups) == -group_max(-scores, groups)


def group_variance(scores: Tensor, groups: Tensor) -> Tensor:
    """Unbiased variance per group (divisor n - 1); 0 for a group of one and for exactly equal scores."""
    centred = (scores - group_mean(scores, groups)[groups]).masked_fill(group_is_constant(scores, groups)[groups], 0.0)
    return group_sum(centred.square(), groups) / (group_size(groups) - 1).clamp(min=1)


def group_statistics(scores: Tensor, groups: Tensor, *, variance_floor: float = 0.0) -> GroupStatistics:
    """Mean, std = sqrt(max(var, floor)) with the n - 1 variance, and size, in the dtype of the scores.

    A group of one has nothing to be compared with: its mean is 0 and its std 1, so that its score stays as it is.
    """
    size = group_size(groups)
    mean = group_mean(scores, groups).masked_fill(size < 2, 0.0)
    std = group_variance(scores, groups).clamp(min=variance_floor).sqrt().masked_fill(size < 2, 1.0)
    return GroupStatistics(mean, std, size)


def _group_count(groups: Tensor) -> int:
    return int(groups.max()) + 1 if len(groups) else 0
