"""Differences, and agreements, that no recorded case shows: the peers' formulas are written out here."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.advantages.base import group_ids
from strop.algorithms.advantages.outcome import grpo
from strop.algorithms.aggregation import Totals, aggregate
from strop.algorithms.losses import value_loss
from strop.algorithms.policy_losses.smooth import gamma_weights
from strop.algorithms.reward_shaping import overlong_penalty
from strop.algorithms.rollout_correction import correct_rollout
from strop.config.compose import load
from strop.rewards.managers import build_scorer
from tests.golden.differences import UNRECORDED
from tests.rewards.scene import TOKENIZER


def test_every_unrecorded_difference_names_a_test() -> None:
    for difference in UNRECORDED:
        assert difference.test in globals(), f"{difference.here}: there is no {difference.test}"


@pytest.mark.parametrize(("compat", "penalty"), [("strop", -1.5), ("verl", -1.5), ("openrlhf", -1.0)])
def test_the_overlong_penalty_beyond_the_limit(compat: str, penalty: float) -> None:
    """DAPO's line ends at the factor in OpenRLHF: c = min(len - L_e, buffer)."""
    config = load("ppo_trainer", ["reward_model.overlong_buffer={enable: true, len: 4}"]).config
    scorer = build_scorer(
        config.reward_model,
        config.custom_reward_function,
        config.reward_manager,
        TOKENIZER,
        max_response_length=10,
        compat=compat,
    )
    capped = scorer.shaping.overlong_capped
    found = overlong_penalty(torch.tensor([12.0]), max_length=10, buffer=4, capped=capped)
    assert found.tolist() == [penalty]


@pytest.mark.parametrize("row", [[-30.0, 15.0], [25.0, -5.0], [-12.0, -12.0], [0.1, -0.3]])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gamma_weights_have_the_limits_of_the_peer(row: list[float], advantage: float) -> None:
    """TRL limits each log-ratio to 20, and the weight of a sequence to 1e-8 and e^20."""
    k, rate = (0.1, 3.0) if advantage > 0 else (0.2, 2.0)
    log_w = max(sum(min(max(x, -20.0), 20.0) for x in row), math.log(1e-8))
    expected = math.exp(rate + k * log_w - rate * math.exp(min(log_w, 20.0)))
    settings = {"k_pos": 0.1, "lambda_pos": 3.0, "k_neg": 0.2, "lambda_neg": 2.0}
    found = gamma_weights(torch.tensor([row]), torch.tensor([[advantage]]), torch.ones(1, 2), **settings)
    assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-12)
    masked = torch.tensor([[1.0, 0.0]])
    weights = torch.tensor([[1.0, 0.5]])  # outside the mask: it does not count here, in TRL it does
    alone = gamma_weights(torch.tensor([row]), torch.tensor([[advantage]]), masked, **settings)
    weighted = gamma_weights(
        torch.tensor([row]), torch.tensor([[advantage]]), masked, rollout_weights=weights, **settings
    )
    assert torch.equal(alone, weighted)


def test_a_fraction_in_a_mask_counts_as_one() -> None:
    losses = torch.tensor([[1.0, 3.0, 100.0]])
    half, whole = torch.tensor([[0.5, 0.25, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        found = aggregate(losses, half, mode, Totals.of(half))
        assert torch.equal(found, aggregate(losses, whole, mode, Totals.of(whole))), mode


def test_no_criterion_rejects_nothing() -> None:
    mask = torch.ones(1, 3)
    old, sampled = torch.zeros(1, 3), torch.full((1, 3), -2.0)
    for nothing in ("", " , ", None):
        assert torch.equal(correct_rollout(old, sampled, mask, rollout_rs=nothing).mask, mask)


# --- the same as the peers ----------------------------------------------------------------------------------


def test_without_a_threshold_there_are_no_weights() -> None:
    """verl computes weights only if rollout_is and rollout_is_threshold are both set."""
    mask = torch.ones(1, 3)
    found = correct_rollout(
        torch.zeros(1, 3), torch.full((1, 3), -2.0), mask, rollout_is="token", rollout_is_threshold=None
    )
    assert found.weights is None and torch.equal(found.mask, mask)
    key = "algorithm.rollout_correction.rollout_is_threshold"
    config = load("ppo_trainer", [f"{key}=null"]).config
    assert config.algorithm.rollout_correction.rollout_is_threshold is None


def test_a_clip_range_of_zero_keeps_the_old_value() -> None:
    """½ max((V - G)², (V_old - G)²): in verl and OpenRLHF the clipped value is the old one."""
    values, old, returns = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 2.5]]), torch.tensor([[3.0, 2.2]])
    found = value_loss(values, old, returns, torch.ones(1, 2), clip_range=0.0).per_token
    assert torch.allclose(found, torch.tensor([[0.5 * 2.5**2, 0.5 * 0.3**2]]))
    assert load("ppo_trainer", ["critic.cliprange_value=0"]).config.critic.cliprange_value == 0
    with pytest.raises(ValueError, match="0 or more"):
        value_loss(values, old, returns, torch.ones(1, 2), clip_range=-0.1)


def test_labels_of_groups_may_be_floats() -> None:
    """verl reads whole numbers written as floats as ids, and other floats as labels."""
    assert group_ids([3.0, 7.0, 3.0], compact=False).tolist() == [3, 7, 3]
    assert group_ids([0.5, 1.5, 0.5], compact=False).tolist() == [0, 1, 0]
    rewards, mask = torch.tensor([[1.0], [0.0], [3.0], [1.0]]), torch.ones(4, 1)
    groups = torch.tensor([5, 5, 9, 9])
    expected = grpo(rewards, mask, groups=groups).advantages
    for labels in (groups.float(), groups / 10):
        assert torch.equal(grpo(rewards, mask, groups=labels).advantages, expected)
