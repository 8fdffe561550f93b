"""The variance-minimising baseline per token position (optimal token baseline).

The weight of a response at token t is the energy of its score function up to t: W_t is the sum over its valid
tokens k <= t of w_k = 1 - 2 pi_k + sum_v pi_v^2, the squared norm of the gradient of log pi_k with respect to
the logits. The baseline of a group is b_t = sum_i W_it G_it / sum_i W_it over its members that have a
valid token t, and A_t = G_t - b_t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    checked_groups,
    checked_like,
    checked_rewards,
    close_holes,
    group_second,
    group_size,
    group_sum,
    rank_among_valid,
    reopen_holes,
)
from strop.algorithms.advantages.returns import returns_to_go
from strop.algorithms.aggregation import EPS, Compat, as_weights


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
    align_turns: bool = False,
    compat: Compat = None,
) -> AdvantageResult:
    """A_t = (G_t - b_t) on valid tokens; a group of one has b = 0.

    Weights w are multiplied by the squared `rollout_is_weights` if given. `handle_zero_tail` sets b to 0
    where only one member has a valid token, because its baseline would be its own return. `align_turns`
    compares the k-th *valid* token of the members instead of the k-th column. `compat="verl"` drops rewards
    outside the mask and keeps returns there. Its zero tail starts at the token count of the second longest
    member, which differs if there are gaps.
    """
    rewards, mask = checked_rewards(rewards, mask)
    groups = checked_groups(groups, rewards)
    alive = as_weights(mask, rewards.dtype)
    energy = _energy(rewards, mask, old_log_probs, sum_pi_squared, rollout_is_weights) * alive
    returns = returns_to_go(rewards, mask, compat=compat)
    ranks = rank_among_valid(alive) if align_turns else None
    aligned = [
        each if ranks is None else close_holes(each, ranks) for each in (returns * alive, energy, alive)
    ]
    baseline = _baseline(aligned[0], aligned[1], aligned[2], groups)[groups]
    if handle_zero_tail:
        baseline = baseline.masked_fill(_only_one_valid(aligned[2], groups, compat), 0.0)
    baseline = baseline if ranks is None else reopen_holes(baseline, ranks)
    return AdvantageResult((returns - baseline) * alive, returns)


def tir_optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    compat: Compat = None,
) -> AdvantageResult:
    """`optimal_token_baseline` for tool-integrated reasoning: tool output between turns is skipped in the
    alignment."""
    return optimal_token_baseline(
        rewards,
        mask,
        groups=groups,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
        align_turns=True,
        compat=compat,
    )


def _energy(
    rewards: Tensor,
    mask: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None,
) -> Tensor:
    """w_t; only its values on valid tokens have a meaning."""
    chosen = checked_like("old_log_probs", old_log_probs, rewards, mask).exp()
    energy = 1.0 - 2.0 * chosen + checked_like("sum_pi_squared", sum_pi_squared, rewards, mask)
    if rollout_is_weights is not None:
        energy = energy * checked_like("rollout_is_weights", rollout_is_weights, rewards, mask).square()
    return energy


def _baseline(returns: Tensor, energy: Tensor, alive: Tensor, groups: Tensor) -> Tensor:
    """b_t of each group, [G, T]."""
    weights = energy.cumsum(-1) * alive
    baseline = group_sum(returns * weights, groups) / (group_sum(weights, groups) + EPS)
    return baseline.masked_fill((group_size(groups) < 2)[:, None], 0.0)


def _only_one_valid(alive: Tensor, groups: Tensor, compat: Compat) -> Tensor:
    """[B, T]: where fewer than two members of the row's group have a valid token."""
    if compat != "verl":
        return (group_sum(alive, groups) < 2)[groups]
    lengths = alive.sum(-1)
    second = group_second(lengths, groups)[groups]
    return (lengths > second)[:, None] & (
        torch.arange(alive.shape[-1], device=alive.device) >= second[:, None]
    )
