"""Answers that consist of several trajectories.

An agent may end a context and go on in a new one (a summary, a hand-over). Each context is a row of the
batch, and all rows of one session are one answer: only its last row carries the outcome, and every row shares
the advantage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    checked_groups,
    checked_rows,
    estimate,
    group_max,
)
from strop.algorithms.aggregation import masked_mean


def estimate_over_sessions(
    name: str,
    *,
    rewards: Tensor,
    mask: Tensor,
    sessions: Tensor,
    order: Tensor,
    groups: Tensor,
    **available: Any,
) -> AdvantageResult:
    """Run an outcome estimator on the last row of each session and give its number to all valid tokens of the
    session.

    `sessions` [B] says which session a row belongs to, `order` [B] its place in it; `groups` [B] are prompts,
    as always. Per-row companions in `available` are reduced to the last rows as well.
    """
    sessions = checked_groups(sessions, rewards)
    order = checked_rows("order", order, rewards)
    is_last = order == group_max(order.double(), sessions)[sessions]
    rows = is_last.nonzero().squeeze(1)
    if len(rows) != int(sessions.max()) + 1:
        raise ValueError(
            "Two rows of one session have the same place in `order`; it must say which is the last."
        )
    of_last: dict[str, Any] = {
        k: v[rows] if isinstance(v, Tensor) and v.shape[:1] == sessions.shape else v
        for k, v in available.items()
    }
    outcome = estimate(name, rewards=rewards[rows], mask=mask[rows], groups=groups[rows], **of_last)
    per_session = outcome.advantages.new_zeros(len(rows))
    per_session[sessions[rows]] = masked_mean(outcome.advantages, mask[rows], dim=-1)
    shared = torch.where(mask.bool(), per_session[sessions][:, None], 0.0)
    return AdvantageResult(shared, shared)
