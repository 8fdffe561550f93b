"""Outcome-based estimators: one advantage per response, copied to each of its tokens.

The score s_i of a response is the sum of all rewards of its row. Scores are compared in float64, and a group
whose scores are all equal gives exactly 0. A response that is alone in its group keeps its score unless
`singleton="zero"`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    Normalisation,
    checked_finite,
    checked_groups,
    checked_scores,
    group_is_constant,
    group_max,
    group_mean,
    group_second,
    group_size,
    group_statistics,
    group_sum,
    normalise,
)
from strop.algorithms.aggregation import as_weights
from strop.compat import Compat, conventions

Singleton = Literal["score", "zero"]


def centred_scores(
    scores: Tensor, groups: Tensor, *, weights: Tensor | None = None, singleton: Singleton = "score"
) -> Tensor:
    """s_i minus the (weighted) mean of its group; exactly 0 in a group of equal scores."""
    centred = scores - group_mean(scores, groups, weights)[groups]
    centred = centred.masked_fill(group_is_constant(scores, groups)[groups], 0.0)
    if singleton == "zero":
        return centred
    return torch.where(group_size(groups)[groups] == 1, scores, centred)


def standardised_scores(
    scores: Tensor,
    groups: Tensor,
    *,
    eps: float = 1e-6,
    variance_floor: float = 0.0,
    singleton: Singleton = "score",
) -> Tensor:
    """(s_i - mean) / (std + eps) within the group, std with divisor n - 1, its square not below
    `variance_floor`."""
    centred = centred_scores(scores, groups, singleton=singleton)
    size = group_size(groups)
    variance = group_sum(centred.square(), groups, len(size)) / (size - 1).clamp(min=1)
    # A group of one is divided by 1, so its score stays unchanged.
    std = variance.clamp(min=variance_floor).sqrt().masked_fill(size < 2, 1.0)
    return centred / (std[groups] + eps)


def grpo(
    rewards: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    variance_floor: float = 0.0,
    singleton: Singleton = "score",
) -> AdvantageResult:
    """GRPO (Shao et al., 2024): A_i = (s_i - mean) / (std + eps).

    Without `norm_by_std` it is Dr. GRPO (Liu et al., 2025): A_i = s_i - mean.
    """
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    if not norm_by_std:
        return _on_tokens(centred_scores(scores, groups, singleton=singleton), mask, rewards)
    made = standardised_scores(scores, groups, eps=eps, variance_floor=variance_floor, singleton=singleton)
    return _on_tokens(made, mask, rewards)


def dr_grpo(
    rewards: Tensor, mask: Tensor, *, groups: Tensor, singleton: Singleton = "score"
) -> AdvantageResult:
    """`grpo` without the division by the standard deviation."""
    return grpo(rewards, mask, groups=groups, norm_by_std=False, singleton=singleton)


def grpo_vectorized(
    rewards: Tensor, mask: Tensor, *, groups: Tensor, norm_by_std: bool = True, eps: float = 1e-6
) -> AdvantageResult:
    """`grpo` with a variance of at least `eps`, so that nearly equal scores do not give large advantages."""
    return grpo(rewards, mask, groups=groups, norm_by_std=norm_by_std, eps=eps, variance_floor=eps)


def grpo_passk(
    rewards: Tensor, mask: Tensor, *, groups: Tensor, norm_by_std: bool = True, eps: float = 1e-6
) -> AdvantageResult:
    """Pass@k GRPO: the best response of a group gets (s_1st - s_2nd) / (std + eps), all others get 0. A tie
    for the best score gives 0."""
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    sizes = group_size(groups)
    if (sizes < 2).any():
        raise ValueError(
            f"Pass@k needs at least 2 samples per group, but {int((sizes < 2).sum())} of the {len(sizes)} "
            f"groups have one (groups {tuple(groups.shape)}, rewards {tuple(rewards.shape)}). Set rollout.n "
            "to 2 or more."
        )
    is_best = scores == group_max(scores, groups)[groups]
    lead = torch.where(is_best, scores - group_second(scores, groups)[groups], 0.0)
    if norm_by_std:
        lead = lead / (group_statistics(scores, groups).std[groups] + eps)
    return _on_tokens(lead, mask, rewards)


def rloo(rewards: Tensor, mask: Tensor, *, groups: Tensor, singleton: Singleton = "score") -> AdvantageResult:
    """RLOO (Ahmadian et al., 2024): s_i minus the mean of the other n - 1 scores, that is (s_i - mean) n / (n
    - 1)."""
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    size = group_size(groups)[groups]
    return _on_tokens(
        centred_scores(scores, groups, singleton=singleton) * size / (size - 1).clamp(min=1), mask, rewards
    )


def rloo_vectorized(rewards: Tensor, mask: Tensor, *, groups: Tensor) -> AdvantageResult:
    """`rloo` in which a group of one gets 0."""
    return rloo(rewards, mask, groups=groups, singleton="zero")


def opo(rewards: Tensor, mask: Tensor, *, groups: Tensor) -> AdvantageResult:
    """OPO (Hao et al., 2025): s_i - sum(len s) / sum(len) of the group, len being the number of valid
    tokens."""
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    return _on_tokens(centred_scores(scores, groups, weights=mask.sum(1).double()), mask, rewards)


def gpg(
    rewards: Tensor, mask: Tensor, *, groups: Tensor, f_norm: float = 1.0, compat: Compat = None
) -> AdvantageResult:
    """GPG (Chu et al., 2025): alpha (s_i - mean) / f_norm, alpha = rows / rows of groups whose scores differ
    (at least 1), because the others have no gradient.

    `compat="verl"` divides by the rows with a score other than 0 instead, which changes if a constant is
    added to all scores.
    """
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    centred = centred_scores(scores, groups)
    counted = (group_max(centred.abs(), groups) > 0)[groups]
    if conventions(compat).gpg_scale == "scores other than 0":
        counted = scores != 0
    alpha = len(scores) / max(int(counted.count_nonzero()), 1)
    return _on_tokens(centred * (alpha / f_norm), mask, rewards)


def reinforce_plus_plus_baseline(
    rewards: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    normalisation: Normalisation = "whiten",
    compat: Compat = None,
) -> AdvantageResult:
    """REINFORCE++ with the group mean as baseline: s_i - mean on every token, then whitened over the
    batch."""
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    return _normalised(_on_tokens(centred_scores(scores, groups), mask, rewards), mask, normalisation, compat)


def gdpo(
    rewards: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    reward_components: Tensor | None = None,
    component_weights: Tensor | None = None,
    eps: float = 1e-6,
    compat: Compat = None,
) -> AdvantageResult:
    """GDPO (Liu et al., 2026): each reward component is standardised in its group; their weighted sum is
    whitened.

    `reward_components` [B, C] are the components of the score, such as correctness and format; by default the
    score is the only component. Components that cancel leave a difference of about `eps`, which whitening
    enlarges; `compat="verl"` standardises in the dtype of the rewards instead of float64, which gives the
    same rounding as verl.
    """
    rewards, mask, scores, groups = _scored(rewards, mask, groups)
    parts = (
        scores[:, None]
        if reward_components is None
        else checked_finite("reward_components", reward_components)
    )
    precision = torch.float64
    if conventions(compat).components == "float32":
        precision = rewards.dtype
    parts = parts.to(precision)
    if parts.dim() != 2 or len(parts) != len(rewards):
        raise ValueError(
            f"reward_components {tuple(parts.shape)} must be [batch, components] for rewards "
            f"{tuple(rewards.shape)}."
        )
    weights = parts.new_ones(parts.shape[1]) if component_weights is None else component_weights.to(parts)
    if weights.shape != parts.shape[1:]:
        raise ValueError(
            f"component_weights {tuple(weights.shape)} must hold a weight per column of reward_components "
            f"{tuple(parts.shape)}."
        )
    standard = torch.stack([standardised_scores(part, groups, eps=eps) for part in parts.unbind(1)], dim=1)
    return _normalised(_on_tokens(standard @ weights, mask, rewards), mask, "whiten", compat)


def flash_reinforce(rewards: Tensor, mask: Tensor) -> AdvantageResult:
    """s_i minus the mean score of the whole batch."""
    return grpo(
        rewards,
        mask,
        groups=torch.zeros(len(rewards), dtype=torch.long, device=rewards.device),
        norm_by_std=False,
    )


def _scored(rewards: Tensor, mask: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rewards, mask, scores = checked_scores(rewards, mask)
    return rewards, mask, scores, checked_groups(groups, rewards)


def _on_tokens(per_row: Tensor, mask: Tensor, rewards: Tensor) -> AdvantageResult:
    advantages = as_weights(mask, rewards.dtype).mul_(per_row.to(rewards.dtype)[:, None])
    return AdvantageResult(advantages, advantages)


def _normalised(result: AdvantageResult, mask: Tensor, how: Normalisation, compat: Compat) -> AdvantageResult:
    advantages = normalise(result.advantages, mask, how, compat=compat) * as_weights(
        mask, result.advantages.dtype
    )
    return AdvantageResult(advantages, advantages)
