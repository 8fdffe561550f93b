from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.reward_shaping import (
    kl_in_reward,
    move_to_trainable,
    overlong_penalty,
    truncation_penalty,
)
from strop.algorithms.selection import groups_that_disagree, groups_within, pf_ppo_weights, resample_rows
from tests.algorithms.reference.terminal_rewards import place_terminal, terminal_rewards


def test_score_lands_on_the_last_valid_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert place_terminal(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 3]]
    with pytest.raises(ValueError, match=r"scores \(2,\) .* mask \(3, 3\)"):
        place_terminal(torch.ones(2), mask)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_moving_rewards_keeps_row_sums_and_leaves_none_outside(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    rewards, mask = torch.randn(rows, width), torch.rand(rows, width) < 0.4
    moved = move_to_trainable(rewards, mask)
    assert (moved[~mask] == 0).all()
    alive = mask.any(1)
    torch.testing.assert_close(moved[alive].sum(1), rewards[alive].sum(1))
    for i in alive.nonzero().flatten().tolist():
        expected = torch.zeros(width)
        valid = mask[i].nonzero().flatten().tolist()
        for t in range(width):
            expected[max([v for v in valid if v <= t], default=valid[0])] += rewards[i, t]
        torch.testing.assert_close(moved[i], expected)


def test_kl_is_charged_on_valid_tokens_and_averaged_by_row() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    log_probs, ref = (
        torch.tensor([[0.0, -1.0, torch.nan], [-1.0, 5.0, 5.0]]),
        torch.tensor([[-0.5, -2.0, 0.0], [-3.0, 0.0, 0.0]]),
    )
    made = kl_in_reward(scores, log_probs, ref, mask, coef=0.1)
    torch.testing.assert_close(made.rewards, torch.tensor([[-0.05, 0.9, 0.0], [1.8, 0.0, 0.0]]))
    assert made.kl == pytest.approx((0.75 + 2.0) / 2)
    with pytest.raises(ValueError, match=r"mask \(2, 2\)"):
        kl_in_reward(scores, log_probs, ref, mask[:, :2], coef=0.1)
    none = kl_in_reward(scores[:0], log_probs[:0], ref[:0], mask[:0], coef=0.1)
    assert none.rewards.shape == (0, 3) and none.kl == 0.0


def test_terminal_rewards_clip_the_score_and_charge_the_kl() -> None:
    kl, mask = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1, 1, 0]])
    settings_ = {"coef": 0.5, "clip_range": (-2.0, 2.0)}
    assert terminal_rewards(torch.tensor([9.0]), kl, mask, **settings_).tolist() == [[-0.5, 1.5, 0.0]]  # type: ignore[arg-type]
    charged = terminal_rewards(torch.tensor([9.0]), kl, mask, compat="openrlhf", **settings_)  # type: ignore[arg-type]
    assert charged.tolist() == [[-0.5, 1.5, -0.5]]
    assert terminal_rewards(torch.tensor([9.0]), kl, mask, coef=-1.0).tolist() == [[0.0, 9.0, 0.0]]


def test_overlong_penalty_with_and_without_cap() -> None:
    lengths = torch.tensor([5, 6, 8, 10, 14])
    assert overlong_penalty(lengths, max_length=10, buffer=4).tolist() == [0, 0, -0.5, -1.0, -2.0]
    assert overlong_penalty(lengths, max_length=10, buffer=4, factor=2.0, capped=True).tolist() == [
        0,
        0,
        -1.0,
        -2.0,
        -2.0,
    ]
    with pytest.raises(ValueError, match="buffer=0 and max_length=10"):
        overlong_penalty(lengths, max_length=10, buffer=0)


def test_truncated_answers_are_scaled_or_replaced() -> None:
    scores, cut = torch.tensor([3.0, 2.0]), torch.tensor([True, False])
    assert truncation_penalty(scores, cut, coef=0.25).tolist() == [0.75, 2.0]
    assert truncation_penalty(scores, cut, coef=1.0).tolist() == [3.0, 2.0]
    assert truncation_penalty(scores, cut, coef=0.0).tolist() == [0.0, 2.0]
    assert truncation_penalty(scores, cut, coef=-3.0).tolist() == [-3.0, 2.0]
    with pytest.raises(ValueError, match=r"got 1\.5"):
        truncation_penalty(scores, cut, coef=1.5)
    with pytest.raises(ValueError, match=r"scores \(2,\) and truncated \(1,\)"):
        truncation_penalty(scores, cut[:1], coef=0.5)


def test_dynamic_sampling_keeps_groups_that_teach() -> None:
    metric = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.3, 0.1, 0.1])
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    assert groups_that_disagree(metric, groups).tolist() == [False, False, True, True, True, False, False]
    assert groups_within(metric, groups, low=0.0, high=1.0).tolist() == [
        False,
        False,
        True,
        True,
        True,
        True,
        True,
    ]
    assert not groups_within(metric, groups, low=0.5, high=1.0).any()
    with pytest.raises(ValueError, match=r"metric \(7,\) and groups \(3,\)"):
        groups_that_disagree(metric, groups[:3])


def test_pf_ppo_weights_and_resampling() -> None:
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0])
    assert pf_ppo_weights(scores, power=2.0).tolist() == pytest.approx([4, 1e-8, 1, 1])
    assert pf_ppo_weights(scores, method="max_min").tolist() == pytest.approx([1, 1e-8, 1, 1])
    assert pf_ppo_weights(scores, method="max_random").tolist() == pytest.approx([0.1, 0.1, 0.4, 0.4])
    rows = resample_rows(
        torch.tensor([0.0, 1.0, 0.0, 3.0]).repeat(500), generator=torch.Generator().manual_seed(0)
    )
    share = (rows % 4 == 3).float().mean()
    assert set((rows % 4).tolist()) == {1, 3} and 0.7 < share < 0.8
    with pytest.raises(ValueError, match="'pow', 'max_min' or 'max_random', got 'top'"):
        pf_ppo_weights(scores, method="top")  # type: ignore[arg-type]
    weights = 0.01 * torch.rand(50)
    again = [resample_rows(weights, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*again)
    for weights in (
        torch.zeros(3),
        torch.tensor([1.0, -1.0]),
        torch.tensor([1.0, torch.nan]),
        torch.ones(2, 2),
    ):
        with pytest.raises(ValueError, match="not all zero"):
            resample_rows(weights)
