"""Estimators based on the (discounted) return of each token: REINFORCE, REINFORCE++, ReMax, generalised
advantage estimation with a critic, and the optimal baseline of each token position."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    Normalisation,
    checked_groups,
    checked_like,
    checked_rewards,
    checked_rows,
    close_holes,
    discounted_sums,
    group_second,
    group_size,
    group_sum,
    has_holes,
    normalise,
    rank_among_valid,
    reopen_holes,
    row_chunks,
)
from strop.algorithms.aggregation import EPS, as_weights
from strop.algorithms.reward_shaping import move_to_trainable
from strop.compat import Compat, Conventions, conventions


def returns_to_go(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    skip_gaps: bool | None = None,
    compat: Compat = None,
) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the valid tokens, 0 elsewhere.

    Gaps, rewards outside the mask and `compat` are handled as in `gae`; with `compat`, gaps keep the values
    of the recursion.
    """
    rewards, mask = checked_rewards(rewards, mask)
    returns = torch.empty_like(rewards)
    rules = conventions(compat)
    skip = _skips_gaps(skip_gaps, rules)
    for rows in row_chunks(rewards):
        weights = as_weights(mask[rows], rewards.dtype)
        _fill_returns(returns[rows], rewards[rows], mask[rows], weights, gamma, skip, rules)
    return returns


def _skips_gaps(skip_gaps: bool | None, rules: Conventions) -> bool:
    if skip_gaps is None:
        return rules.gaps == "skipped"
    return skip_gaps


def _kept_rewards(rewards: Tensor, mask: Tensor, weights: Tensor, rules: Conventions) -> Tensor:
    """Rewards that are 0 outside the mask."""
    if rules.stray_rewards == "lost":
        return rewards * weights
    return move_to_trainable(rewards, mask, weights)


def _fill_returns(
    out: Tensor,
    rewards: Tensor,
    mask: Tensor,
    weights: Tensor,
    gamma: float,
    skip_gaps: bool,
    rules: Conventions,
) -> None:
    kept = _kept_rewards(rewards, mask, weights, rules)
    if skip_gaps and gamma != 1.0 and has_holes(weights):
        ranks = rank_among_valid(weights)
        summed = reopen_holes(discounted_sums(close_holes(kept, ranks), gamma), ranks)
    else:
        summed = discounted_sums(kept, gamma)
    torch.mul(summed, 1.0 if rules.outside_mask == "kept" else weights, out=out)


def reinforce(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    normalisation: Normalisation = "none",
    skip_gaps: bool | None = None,
    compat: Compat = None,
) -> AdvantageResult:
    """REINFORCE (Williams, 1992): A_t = G_t, optionally normalised over the tokens of the batch."""
    returns = returns_to_go(rewards, mask, gamma=gamma, skip_gaps=skip_gaps, compat=compat)
    return AdvantageResult(normalise(returns, mask.bool(), normalisation, compat=compat), returns)


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    normalisation: Normalisation = "whiten",
    compat: Compat = None,
) -> AdvantageResult:
    """REINFORCE++ (Hu, 2025): G_t whitened over the tokens of the batch, or only centred.

    `compat="verl"` drops rewards outside the mask and raises an error for fewer than two valid tokens.
    """
    returns = returns_to_go(rewards, mask, gamma=gamma, compat=compat)
    weights = as_weights(mask, returns.dtype)
    return AdvantageResult(
        normalise(returns, mask.bool(), normalisation, compat=compat) * weights, returns * weights
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
    rules = conventions(compat)
    for rows in row_chunks(rewards):
        weights = as_weights(mask[rows], rewards.dtype)
        _fill_returns(returns[rows], rewards[rows], mask[rows], weights, 1.0, True, rules)
        torch.addcmul(returns[rows], weights, -baselines[rows, None], out=advantages[rows])
    return AdvantageResult(advantages, returns)


# --- generalised advantage estimation (Schulman et al., 2016) -----------------------------------------------


def gae(
    rewards: Tensor,
    mask: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalisation: Normalisation = "whiten",
    skip_gaps: bool | None = None,
    compat: Compat = None,
) -> AdvantageResult:
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t; returns = A + V, before A is
    normalised.

    t + 1 is the next *valid* token, so tokens that the policy did not sample are neither discounted nor given
    a value. `skip_gaps=False` treats such gaps as tokens of value 0, which `compat="openrlhf"` does too.

    A reward outside the mask is added to the last valid token before it. With `compat` it is dropped instead,
    and positions outside the mask are not set to 0: "verl" keeps the next valid advantage there, "openrlhf"
    the intermediate value of its recursion.
    """
    rewards, mask = checked_rewards(rewards, mask)
    finite_values = checked_like("values", values, rewards, mask)
    advantages = torch.empty_like(rewards)
    returns = torch.empty_like(rewards)
    rules = conventions(compat)
    skip = _skips_gaps(skip_gaps, rules)
    for rows in row_chunks(rewards):
        weights = as_weights(mask[rows], rewards.dtype)
        kept_values = finite_values[rows] * weights
        kept_rewards = _kept_rewards(rewards[rows], mask[rows], weights, rules)
        made = _recursion(kept_rewards, kept_values, weights, gamma, lam, skip)
        torch.mul(made, 1.0 if rules.outside_mask == "kept" else weights, out=advantages[rows])
        added_values = kept_values
        if rules.gap_returns == "with values":
            added_values = values[rows].detach()
        torch.add(advantages[rows], added_values, out=returns[rows])
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


# --- the variance-minimising baseline per token position (optimal token baseline) ---------------------------
#
# The weight of a response at token t is the energy of its score function up to t: W_t is the sum over its
# valid tokens k <= t of w_k = 1 - 2 pi_k + sum_v pi_v^2, the squared norm of the gradient of log pi_k with
# respect to the logits. The baseline of a group is b_t = sum_i W_it G_it / sum_i W_it over its members that
# have a valid token t, and A_t = G_t - b_t.


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
    if conventions(compat).zero_tail == "one member left":
        return (group_sum(alive, groups) < 2)[groups]
    lengths = alive.sum(-1)
    second = group_second(lengths, groups)[groups]
    return (lengths > second)[:, None] & (
        torch.arange(alive.shape[-1], device=alive.device) >= second[:, None]
    )
