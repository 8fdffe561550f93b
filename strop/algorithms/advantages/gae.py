"""Generalised advantage estimation (Schulman et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    Normalisation,
    checked_like,
    checked_rewards,
    close_holes,
    discounted_sums,
    has_holes,
    normalise,
    rank_among_valid,
    reopen_holes,
    row_chunks,
)
from strop.algorithms.aggregation import Compat, as_weights
from strop.algorithms.reward_shaping import move_to_trainable


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
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t; returns = A + V, before A is
    normalised.

    t + 1 is the next *valid* token, so tokens that the policy did not sample are neither discounted nor given
    a value. `skip_gaps=False` treats such gaps as tokens of value 0 (OpenRLHF).

    A reward outside the mask is added to the last valid token before it. With `compat` it is dropped instead,
    and positions outside the mask are not set to 0: "verl" keeps the next valid advantage there, "openrlhf"
    the intermediate value of its recursion.
    """
    rewards, mask = checked_rewards(rewards, mask)
    finite_values = checked_like("values", values, rewards, mask)
    advantages = torch.empty_like(rewards)
    returns = torch.empty_like(rewards)
    for rows in row_chunks(rewards):
        weights = as_weights(mask[rows], rewards.dtype)
        kept_values = finite_values[rows] * weights
        kept_rewards = (
            rewards[rows] * weights if compat else move_to_trainable(rewards[rows], mask[rows], weights)
        )
        made = _recursion(kept_rewards, kept_values, weights, gamma, lam, skip_gaps)
        torch.mul(made, 1.0 if compat else weights, out=advantages[rows])
        torch.add(
            advantages[rows], values[rows].detach() if compat == "verl" else kept_values, out=returns[rows]
        )
    return AdvantageResult(normalise(advantages, mask, normalisation, compat=compat), returns)


def _recursion(
    rewards: Tensor, values: Tensor, weights: Tensor, gamma: float, lam: float, skip_gaps: bool
) -> Tensor:
    """Advantages of valid tokens. Rewards and values must be 0 outside the mask; a gap gets the advantage of
    the token after it."""
    if not skip_gaps or not has_holes(weights):
        return discounted_sums(_deltas(rewards, values, gamma), gamma * lam)
    ranks = rank_among_valid(weights)
    deltas = _deltas(close_holes(rewards, ranks), close_holes(values, ranks), gamma)
    return reopen_holes(discounted_sums(deltas, gamma * lam), ranks)


def _deltas(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    """d_t = r_t + gamma V_{t+1} - V_t; the value after the last column is 0."""
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    return deltas
