"""Estimators based on the (discounted) return of each token, without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    Normalisation,
    checked_rewards,
    checked_rows,
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


def returns_to_go(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, skip_gaps: bool = True, compat: Compat = None
) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the valid tokens, 0 elsewhere.

    Gaps, rewards outside the mask and `compat` are handled as in `gae`; with `compat`, gaps keep the values
    of the recursion.
    """
    rewards, mask = checked_rewards(rewards, mask)
    returns = torch.empty_like(rewards)
    for rows in row_chunks(rewards):
        weights = as_weights(mask[rows], rewards.dtype)
        _fill_returns(returns[rows], rewards[rows], mask[rows], weights, gamma, skip_gaps, compat)
    return returns


def _fill_returns(
    out: Tensor, rewards: Tensor, mask: Tensor, weights: Tensor, gamma: float, skip_gaps: bool, compat: Compat
) -> None:
    kept = rewards * weights if compat else move_to_trainable(rewards, mask, weights)
    if skip_gaps and gamma != 1.0 and has_holes(weights):
        ranks = rank_among_valid(weights)
        summed = reopen_holes(discounted_sums(close_holes(kept, ranks), gamma), ranks)
    else:
        summed = discounted_sums(kept, gamma)
    torch.mul(summed, 1.0 if compat else weights, out=out)


def reinforce(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    normalisation: Normalisation = "none",
    skip_gaps: bool = True,
    compat: Compat = None,
) -> AdvantageResult:
    """REINFORCE (Williams, 1992): A_t = G_t, optionally normalised over the tokens of the batch."""
    returns = returns_to_go(rewards, mask, gamma=gamma, skip_gaps=skip_gaps, compat=compat)
    return AdvantageResult(normalise(returns, mask.bool(), normalisation, compat=compat), returns)


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, compat: Compat = None
) -> AdvantageResult:
    """REINFORCE++ (Hu, 2025): G_t whitened over the tokens of the batch.

    `compat="verl"` drops rewards outside the mask and raises an error for fewer than two valid tokens.
    """
    returns = returns_to_go(rewards, mask, gamma=gamma, compat=compat)
    weights = as_weights(mask, returns.dtype)
    return AdvantageResult(
        normalise(returns, mask.bool(), "whiten", compat=compat) * weights, returns * weights
    )


def remax(
    rewards: Tensor, mask: Tensor, *, reward_baselines: Tensor, compat: Compat = None
) -> AdvantageResult:
    """ReMax (Li et al., 2024): A_t = G_t - b with b [B] the total reward of one greedy response to the same
    prompt.

    `compat="verl"` drops rewards outside the mask and keeps G_t (without baseline) in gaps.
    """
    rewards, mask = checked_rewards(rewards, mask)
    baselines = checked_rows("reward_baselines", reward_baselines, rewards).to(rewards.dtype)
    advantages = torch.empty_like(rewards)
    returns = torch.empty_like(rewards)
    for rows in row_chunks(rewards):
        weights = as_weights(mask[rows], rewards.dtype)
        _fill_returns(returns[rows], rewards[rows], mask[rows], weights, 1.0, True, compat)
        torch.addcmul(returns[rows], weights, -baselines[rows, None], out=advantages[rows])
    return AdvantageResult(advantages, returns)
