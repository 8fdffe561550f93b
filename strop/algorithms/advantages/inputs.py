"""What every estimator asks of its input, checked in one place.

Advantages and returns are targets: inputs are cut off the graph here, so no gradient ever flows through an estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.advantages.grouping import group_ids


def checked_rewards(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards in float32 or wider, finite everywhere, and the mask as bool.

    A reward that is not finite is refused where the mask is set and read as 0 elsewhere.
    """
    rewards, mask, _ = checked_scores(rewards, mask)
    return rewards, mask


def checked_scores(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`checked_rewards`, and the score of each row: the sum of its rewards, in float64."""
    if rewards.dim() != 2 or rewards.shape != mask.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and mask {tuple(mask.shape)} must have one shape [batch, tokens]."
            + (" Put a score per row on its last token first: `place_terminal`." if rewards.dim() == 1 else "")
        )
    mask, wide = mask.bool(), rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    sums = wide.sum(dim=-1)
    # A NaN or an infinity anywhere in a row makes its sum non-finite.
    if not torch.isfinite(sums).all():
        wide = _finite("rewards", wide, mask)
        sums = wide.sum(dim=-1)
    return wide, mask, sums.double()


def checked_like(name: str, tensor: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """A per-token companion of the rewards in their dtype, finite everywhere."""
    if tensor.shape != rewards.shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} must have the shape of rewards {tuple(rewards.shape)}.")
    return _finite(name, tensor.to(rewards.dtype), mask)


def _finite(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    tensor = tensor.detach()
    # One cheap sum tells whether anything is amiss: a NaN or an infinity anywhere makes it non-finite.
    if torch.isfinite(tensor.sum()):
        return tensor
    strange = ~torch.isfinite(tensor)
    refused = (strange & mask).nonzero()
    if len(refused):
        row, column = refused[0].tolist()
        raise ValueError(
            f"{name} {tuple(tensor.shape)} hold {len(refused)} values under the mask {tuple(mask.shape)} that are NaN or "
            f"infinite, the first at row {row}, token {column}. Mask such a sample, or repair what computed it."
        )
    return tensor.masked_fill(strange, 0.0)


def checked_rows(name: str, tensor: Tensor, rewards: Tensor) -> Tensor:
    """One finite entry per row of the rewards."""
    if tensor.dim() != 1 or len(tensor) != len(rewards):
        raise ValueError(
            f"{name} {tuple(tensor.shape)} must hold one entry per row of rewards {tuple(rewards.shape)}: ({len(rewards)},)."
        )
    return checked_finite(name, tensor)


def checked_finite(name: str, tensor: Tensor) -> Tensor:
    """A tensor with one number or more per row, none of them NaN or infinite, cut off the graph."""
    strange = (~torch.isfinite(tensor)).nonzero()
    if len(strange):
        raise ValueError(
            f"{name} {tuple(tensor.shape)} hold {len(strange)} values that are NaN or infinite, the first in row "
            f"{int(strange[0][0])}. Mask such a sample, or repair what computed it."
        )
    return tensor.detach()


def checked_groups(groups: Tensor | Sequence[Any] | np.ndarray, rewards: Tensor) -> Tensor:
    """Group labels, or prompt uids of any kind, as ids 0, 1, 2 ... without gaps."""
    groups = groups if isinstance(groups, Tensor) else group_ids(groups)
    checked_rows("groups", groups, rewards)
    if groups.is_floating_point() or groups.is_complex():
        raise ValueError(f"groups must be integer labels, got {groups.dtype}; `group_ids` makes them from prompt uids.")
    return torch.unique(groups.to(rewards.device), return_inverse=True)[1]
