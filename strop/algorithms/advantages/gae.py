"""Generalised advantage estimation (Schulman et al., 2016)."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.advantages.inputs import checked_like, checked_rewards
from strop.algorithms.advantages.normalise import Normalisation, normalise
from strop.algorithms.advantages.result import AdvantageResult
from strop.algorithms.advantages.scan import close_holes, discounted_sums, has_holes, rank_among_valid, reopen_holes
from strop.algorithms.masked import Compat
from strop.algorithms.reward_placement import move_to_trainable


def gae(
    rewards: Tensor,
    mask: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalisation: Normalisation = "whiten",
    skip_gaps: bool = True,
    compat: Compat = None,
) -> AdvantageResult:
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t; returns = A + V, before A is normalised.

    t + 1 means the next *valid* token, so text the policy did not write is neither discounted nor scored by the critic.
    `skip_gaps=False` walks through such gaps as if they were tokens of value 0 (OpenRLHF).

    A reward standing outside the mask counts for the last valid token before it. With `compat` it is lost instead, and
    positions outside the mask are not zeroed: "verl" keeps the next valid advantage there, "openrlhf" what its recursion
    passes through.
    """
    rewards, mask = checked_rewards(rewards, mask)
    kept_values = checked_like("values", values, rewards, mask)
    rewards = rewards.masked_fill(~mask, 0.0) if compat else move_to_trainable(rewards, mask)
    if skip_gaps and has_holes(mask):
        ranks = rank_among_valid(mask)
        deltas = _deltas(close_holes(rewards, mask, ranks), close_holes(kept_values, mask, ranks), gamma)
        advantages = reopen_holes(discounted_sums(deltas, gamma * lam), ranks)
    else:
        advantages = discounted_sums(_deltas(rewards, kept_values, gamma), gamma * lam)
    if compat == "verl":
        returns = advantages + values.to(advantages.dtype)
    elif compat == "openrlhf":
        returns = advantages + kept_values
    else:
        returns = (advantages + kept_values).masked_fill_(~mask, 0.0)
    return AdvantageResult(normalise(advantages, mask, normalisation, compat=compat), returns)


def _deltas(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    """d_t = r_t + gamma V_{t+1} - V_t; beyond the last column the value is 0."""
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    return deltas
