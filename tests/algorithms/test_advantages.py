from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    close_holes,
    discounted_sums,
    estimate,
    group_ids,
    group_second,
    group_statistics,
    normalise,
    rank_among_valid,
    reopen_holes,
)
from strop.algorithms.advantages.outcome import grpo, grpo_passk, rloo
from strop.algorithms.advantages.returns import gae, reinforce_plus_plus, remax, returns_to_go
from strop.algorithms.aggregation import as_weights
from strop.catalog import ADVANTAGES
from tests.algorithms.reference.sessions import estimate_over_sessions

BUILT_IN = [name for name in ADVANTAGES.names() if ADVANTAGES.entry(name).source == "built-in"]
some = settings(max_examples=25, deadline=None)


def batch_of(rows: int, width: int, seed: int, *, holes: bool = True, group: int = 2) -> dict[str, Tensor]:
    """What every estimator can ask for; the outcome stands on the last column, valid or not."""
    torch.manual_seed(seed)
    mask = (
        torch.rand(rows, width) < 0.7
        if holes
        else torch.arange(width) < torch.randint(1, width + 1, (rows, 1))
    )
    mask[:, 0] = True
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.randn(rows)
    return {
        "rewards": rewards,
        "mask": mask,
        "values": torch.randn(rows, width),
        "groups": torch.arange(rows) // group,
        "reward_baselines": torch.randn(rows),
        "old_log_probs": -torch.rand(rows, width),
        "sum_pi_squared": torch.rand(rows, width),
        "reward_components": torch.randn(rows, 3),
    }


def run(name: str, batch: dict[str, Tensor]) -> AdvantageResult:
    return estimate(name, **batch, gamma=0.9, lam=0.8)


def slow_gae(rewards: Tensor, mask: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """The definition, token by token, in float64."""
    out = torch.zeros(rewards.shape, dtype=torch.float64)
    for i in range(len(rewards)):
        next_value = running = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[i, t]:
                delta = float(rewards[i, t]) + gamma * next_value - float(values[i, t])
                running = delta + gamma * lam * running
                next_value = float(values[i, t])
                out[i, t] = running
    return out


@some
@given(st.integers(1, 5), st.integers(0, 200), st.sampled_from([0.0, 0.3, 0.95, 1.0]), st.integers(0, 99))
def test_blocked_scan_equals_the_recursion(rows: int, width: int, decay: float, seed: int) -> None:
    torch.manual_seed(seed)
    terms = torch.randn(rows, width, dtype=torch.float64)
    expected, running = torch.zeros_like(terms), torch.zeros(rows, dtype=torch.float64)
    for t in reversed(range(width)):
        running = terms[:, t] + decay * running
        expected[:, t] = running
    torch.testing.assert_close(discounted_sums(terms, decay), expected)


@some
@given(st.integers(1, 6), st.integers(1, 70), st.booleans(), st.integers(0, 99))
def test_gae_equals_the_definition(rows: int, width: int, holes: bool, seed: int) -> None:
    b = batch_of(rows, width, seed, holes=holes)
    rewards = torch.randn(rows, width) * b["mask"]
    made = gae(rewards, b["mask"], values=b["values"], gamma=0.97, lam=0.9, normalisation="none")
    expected = slow_gae(rewards, b["mask"], b["values"], 0.97, 0.9)
    torch.testing.assert_close(made.advantages.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.returns, made.advantages + b["values"] * b["mask"])


def test_gae_over_a_gap_is_that_of_the_turns_joined() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1]])
    values = torch.tensor([[0.5, 0.55, 9.0, 9.0, 9.0, 0.6, 0.7]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 0, 1]])
    made = gae(rewards, mask, values=values, lam=0.95, normalisation="none").advantages
    torch.testing.assert_close(made[mask.bool()], torch.tensor([0.4449625, 0.41575, 0.385, 0.3]))
    walked = gae(rewards, mask, values=values, lam=0.95, normalisation="none", skip_gaps=False).advantages
    torch.testing.assert_close(
        walked[mask.bool()], torch.tensor([0.3142, 0.2781, 0.385, 0.3]), rtol=1e-3, atol=1e-4
    )


def test_reinforce_discounts_a_gap_only_if_told_to() -> None:
    given = {"rewards": torch.tensor([[0.0, 0.0, 1.0]]), "mask": torch.tensor([[1, 0, 1]])}
    for settings_, expected in (
        ({}, [1.0, 0.0, 1.0]),
        ({"gamma": 0.5}, [0.5, 0.0, 1.0]),
        ({"gamma": 0.5, "skip_gaps": False}, [0.25, 0.0, 1.0]),
    ):
        made = estimate("reinforce", **given, **settings_)
        assert made.advantages.tolist() == made.returns.tolist() == [expected]


def test_a_zero_tail_begins_where_one_member_is_left() -> None:
    """Of one group; the second row has a gap, so at the third column only the first has a token."""
    made = estimate(
        "optimal_token_baseline",
        rewards=torch.tensor([[0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 1.0]]),
        mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]]),
        groups=torch.tensor([0, 0]),
        old_log_probs=torch.full((2, 4), 0.5).log(),
        sum_pi_squared=torch.full((2, 4), 0.5),
        handle_zero_tail=True,
    ).advantages
    assert made[0, 2] == 3.0 and made[1, 2] == 0.0
    torch.testing.assert_close(made[:, :2], torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    torch.testing.assert_close(made[:, 3], torch.tensor([3 - 15 / 7, 1 - 15 / 7]))


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("seed", range(3))
def test_permuting_the_batch_permutes_the_result(name: str, seed: int) -> None:
    b = batch_of(8, 12, seed)
    order = torch.randperm(8)
    expected = run(name, b)
    got = run(name, {key: value[order] for key, value in b.items()})
    torch.testing.assert_close(got.advantages, expected.advantages[order], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.returns, expected.returns[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
def test_padding_columns_change_nothing(name: str) -> None:
    b = batch_of(8, 12, 3)
    wider = {
        k: torch.nn.functional.pad(v, (0, 5)) if v.dim() == 2 and v.shape[1] == 12 else v
        for k, v in b.items()
    }
    expected, got = run(name, b), run(name, wider)
    torch.testing.assert_close(got.advantages[:, :12], expected.advantages, rtol=1e-5, atol=1e-6)
    assert (got.advantages[:, 12:] == 0).all() and (got.returns[:, 12:] == 0).all()


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "optimal_token_baseline"])
def test_holes_change_nothing_on_valid_tokens(name: str) -> None:
    """`optimal_token_baseline` compares columns by design; its tool variant is the one that aligns turns."""
    plain = batch_of(6, 9, 4, holes=False)
    torch.manual_seed(0)
    where = [torch.randperm(14)[:9].sort().values for _ in range(6)]

    def spread(rows: Tensor) -> Tensor:
        out = torch.full((6, 14), 7 if rows.is_floating_point() else 0, dtype=rows.dtype)
        for row, columns, source in zip(out, where, rows):
            row[columns] = source
        return out

    holed = {k: spread(v) if v.dim() == 2 and v.shape[1] == 9 else v for k, v in plain.items()}
    holed["rewards"][holed["rewards"] == 7] = 0
    expected, got = run(name, plain).advantages, run(name, holed).advantages
    torch.testing.assert_close(
        torch.stack([row[c] for row, c in zip(got, where)]), expected, rtol=1e-5, atol=1e-6
    )
    assert (got[~holed["mask"].bool()] == 0).all()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "kind", ["group_of_one", "equal", "single_token", "empty_row", "all_empty", "one_row"]
)
def test_edges_are_finite_and_zero_outside(name: str, kind: str) -> None:
    b = batch_of(1 if kind == "one_row" else 6, 1 if kind in ("single_token", "one_row") else 7, 5, group=3)
    if kind == "group_of_one":
        b["groups"] = torch.tensor([0, 1, 1, 1, 2, 2])
    if kind == "equal":
        b["rewards"][:, -1] = 0.7
    if kind == "empty_row":
        b["mask"][2] = False
    if kind == "all_empty":
        b["mask"][:] = False
    if name == "grpo_passk" and kind in ("group_of_one", "one_row"):
        with pytest.raises(ValueError, match="at least 2 samples per group"):
            run(name, b)
        return
    result = run(name, b)
    for tensor in result:
        assert tensor.dtype == torch.float32 and torch.isfinite(tensor).all()
        assert (tensor[~b["mask"]] == 0).all()


@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize(
    "name", ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
)
def test_equal_scores_give_exactly_zero(name: str, score: float) -> None:
    b = batch_of(9, 6, 6, holes=False, group=3)
    b["rewards"] = b["rewards"] * 0
    b["rewards"][:, 0] = score
    assert (run(name, b).advantages == 0).all()


def test_whitening_equal_advantages_gives_exactly_zero() -> None:
    values, mask = torch.full((3, 1001), 0.1), torch.ones(3, 1001, dtype=torch.bool)
    assert (values - values.sum(1).double().sum() / 3003).any(), "the mean is rounded"
    assert (normalise(values, mask, "whiten") == 0).all()
    assert (normalise(values, mask, "population") == 0).all()


def test_a_reward_on_a_masked_token_reaches_the_last_trainable_one() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 0, 0]])
    stray = torch.tensor([[0.0, 0, 0, 0, 1.0], [2.0, 0, 0, 0, 0.5]])
    placed = torch.tensor([[0.0, 0, 0, 1.0, 0], [0, 2.0, 0.5, 0, 0]])
    values = torch.randn(2, 5)
    for result, expected in (
        (
            gae(stray, mask, values=values, gamma=0.9, lam=0.8),
            gae(placed, mask, values=values, gamma=0.9, lam=0.8),
        ),
        (reinforce_plus_plus(stray, mask, gamma=0.9), reinforce_plus_plus(placed, mask, gamma=0.9)),
    ):
        torch.testing.assert_close(result, expected)
    assert returns_to_go(stray, mask).tolist() == [[1, 1, 0, 1, 0], [0, 2.5, 0.5, 0, 0]]
    assert returns_to_go(stray, mask, compat="verl").abs().sum() == 0
    baselines = torch.tensor([1.0, 0.0])
    assert remax(stray, mask, reward_baselines=baselines).advantages.tolist() == [
        [0, 0, 0, 0, 0],
        [0, 2.5, 0.5, 0, 0],
    ]


def test_grpo_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [3.0, 0.0]])
    groups = torch.tensor([7, 7, 3])
    made = grpo(rewards, torch.ones(3, 2), groups=groups).advantages
    torch.testing.assert_close(made[:, 0], torch.tensor([0.707106, -0.707106, 3.0]), rtol=1e-5, atol=1e-6)
    assert grpo(rewards, torch.ones(3, 2), groups=groups, norm_by_std=False).advantages[:, 0].tolist() == [
        0.5,
        -0.5,
        3.0,
    ]
    assert grpo(rewards, torch.ones(3, 2), groups=groups, singleton="zero").advantages[2].tolist() == [
        0.0,
        0.0,
    ]
    alone = estimate("dr_grpo", rewards=rewards, mask=torch.ones(3, 2), groups=groups, singleton="zero")
    assert alone.advantages[:, 0].tolist() == [0.5, -0.5, 0.0]
    assert rloo(rewards, torch.ones(3, 2), groups=groups).advantages[:, 0].tolist() == [1.0, -1.0, 3.0]


def test_gpg_counts_a_response_that_is_alone_by_its_score() -> None:
    scores = torch.tensor([[1.0], [1.0], [-3.0], [0.0]])
    made = estimate("gpg", rewards=scores, mask=torch.ones(4, 1), groups=torch.tensor([0, 0, 1, 2]))
    assert made.advantages.flatten().tolist() == [0.0, 0.0, -12.0, 0.0], "one of four rows teaches"


def test_pass_at_k_rewards_only_the_lone_winner() -> None:
    scores = torch.tensor([[1.0], [0.25], [0.0], [2.0], [2.0], [0.0]])
    made = grpo_passk(scores, torch.ones(6, 1), groups=torch.tensor([0, 0, 0, 1, 1, 1]), norm_by_std=False)
    assert made.advantages.flatten().tolist() == [0.75, 0, 0, 0, 0, 0]


def test_wide_rewards_stay_wide_and_narrow_ones_become_float32() -> None:
    b = batch_of(4, 5, 0)
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        assert gae(b["rewards"].to(dtype), b["mask"], values=b["values"]).advantages.dtype == expected


@pytest.mark.parametrize("name", BUILT_IN)
def test_nan_outside_the_mask_never_leaks(name: str) -> None:
    b = batch_of(6, 8, 8, holes=False)
    b["mask"][:, -1] = False
    b["rewards"] = torch.randn(6, 8) * b["mask"]
    expected = run(name, b).advantages
    poisoned = {
        k: v.masked_fill(~b["mask"], torch.nan) if v.shape == (6, 8) and k != "mask" else v
        for k, v in b.items()
    }
    torch.testing.assert_close(run(name, poisoned).advantages, expected)


@pytest.mark.parametrize("name", BUILT_IN)
def test_targets_carry_no_gradient(name: str) -> None:
    b = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in batch_of(6, 8, 9).items()}
    result = run(name, b)
    assert not result.advantages.requires_grad and not result.returns.requires_grad


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_rows_and_no_columns(name: str) -> None:
    b = batch_of(4, 5, 0)
    assert run(name, {k: v[:0] for k, v in b.items()}).advantages.shape == (0, 5)
    narrow = {k: v[:, :0] if v.shape == (4, 5) else v for k, v in b.items()}
    assert run(name, narrow).advantages.shape == (4, 0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_nan_under_the_mask_is_refused(name: str) -> None:
    b = batch_of(4, 5, 0)
    b["rewards"][2, 0] = torch.nan
    with pytest.raises(ValueError, match=r"rewards \(4, 5\) hold 1 values .*\(4, 5\).* row 2, token 0"):
        run(name, b)


def test_wrong_shapes_name_both() -> None:
    b = batch_of(4, 5, 0)
    with pytest.raises(ValueError, match=r"rewards \(4, 5\) and mask \(4, 6\)"):
        grpo(b["rewards"], torch.ones(4, 6), groups=b["groups"])
    with pytest.raises(ValueError, match=r"groups \(3,\) .* rewards \(4, 5\)"):
        grpo(b["rewards"], b["mask"], groups=b["groups"][:3])
    with pytest.raises(ValueError, match="labels that can be sorted"):
        grpo(b["rewards"], b["mask"], groups=b["groups"].to(torch.complex64))
    with pytest.raises(ValueError, match=r"values \(4, 4\) .* rewards \(4, 5\)"):
        gae(b["rewards"], b["mask"], values=b["values"][:, :4])
    with pytest.raises(ValueError, match=r"reward_baselines \(4, 1\) .* rewards \(4, 5\)"):
        remax(b["rewards"], b["mask"], reward_baselines=torch.zeros(4, 1))
    with pytest.raises(ValueError, match="score of each row on its last trained token"):
        grpo(torch.zeros(4), b["mask"], groups=b["groups"])
    with pytest.raises(ValueError, match="normalisation must be one of"):
        gae(b["rewards"], b["mask"], values=b["values"], normalisation="std")  # type: ignore[arg-type]


def test_numbers_per_row_are_checked_too() -> None:
    b = batch_of(4, 5, 0)
    broken = b["reward_baselines"].clone().index_fill_(0, torch.tensor([2]), torch.nan)
    with pytest.raises(ValueError, match=r"reward_baselines \(4,\) hold 1 values .* row 2"):
        remax(b["rewards"], b["mask"], reward_baselines=broken)
    parts = b["reward_components"].clone()
    parts[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"reward_components \(4, 3\) hold 1 values .* row 1"):
        estimate("gdpo", **b | {"reward_components": parts})
    for wrong in (b["reward_components"][:3], b["reward_components"][:, 0]):
        with pytest.raises(ValueError, match=r"must be \[batch, components\] for rewards \(4, 5\)"):
            estimate("gdpo", **b | {"reward_components": wrong})


def test_uids_serve_as_groups() -> None:
    b = batch_of(4, 5, 0)
    uids = ["b", "b", "a", "a"]
    assert torch.equal(
        grpo(b["rewards"], b["mask"], groups=uids)[0],
        grpo(b["rewards"], b["mask"], groups=group_ids(uids))[0],
    )  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"groups \(3,\) .* rewards \(4, 5\)"):
        grpo(b["rewards"], b["mask"], groups=uids[:3])  # type: ignore[arg-type]


def test_estimate_passes_what_is_named_and_says_what_is_missing() -> None:
    b = batch_of(4, 5, 0)
    with pytest.raises(ValueError, match="'gae' needs values, but only mask, rewards are available"):
        estimate("gae", rewards=b["rewards"], mask=b["mask"], values=None)
    with pytest.raises(ValueError, match="Did you mean 'grpo'"):
        estimate("grppo", **b)


def test_every_need_is_an_argument() -> None:
    argument = {"group": "groups", "greedy_baseline": "reward_baselines"}
    for name in BUILT_IN:
        parameters = inspect.signature(ADVANTAGES.get(name)).parameters
        needs = {argument.get(need, need) for need in ADVANTAGES.entry(name).facts["needs"]}
        required = {p.name for p in parameters.values() if p.default is p.empty} - {"rewards", "mask"}
        assert required <= needs <= set(parameters), name


def test_a_plugin_may_return_one_tensor() -> None:
    ADVANTAGES.declare(
        "test_only_plugin", lambda rewards, mask, **rest: rewards * rest["scale"], source="a test"
    )
    made = estimate("test_only_plugin", rewards=torch.ones(1, 2), mask=torch.ones(1, 2), scale=3.0)
    assert made.advantages.tolist() == made.returns.tolist() == [[3.0, 3.0]]


def test_group_ids_accept_any_label() -> None:
    assert group_ids(["b", "a", "b"]).tolist() == [1, 0, 1]
    assert group_ids([50, -3, 50]).tolist() == [1, 0, 1]
    assert group_ids(torch.tensor([9, 9, 2])).tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
        group_ids([["a", "b"]])


def test_group_statistics_by_hand() -> None:
    scores = torch.tensor([1.0, 3.0, 5.0, 9.0, 1.0, 3.0, 0.1, 0.1, 0.1])
    made = group_statistics(scores, torch.tensor([0, 0, 2, 0, 3, 3, 4, 4, 4]))
    assert made.size.tolist() == [3, 0, 1, 2, 3]
    torch.testing.assert_close(made.mean, torch.tensor([13 / 3, 0.0, 0.0, 2.0, 0.1]))
    torch.testing.assert_close(made.std, torch.tensor([4.163332, 1.0, 1.0, 2**0.5, 0.0]), rtol=1e-6, atol=0)
    assert group_second(torch.tensor([1.0, 3.0, 3.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])).tolist() == [
        3.0,
        2.0,
    ]


@some
@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 99))
def test_closing_and_reopening_holes_is_the_identity(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    mask = torch.rand(rows, width) < 0.5
    values = torch.randn(rows, width) * mask
    ranks = rank_among_valid(as_weights(mask, torch.float32))
    closed = close_holes(values, ranks)
    assert [row[:n].tolist() for row, n in zip(closed, mask.sum(1))] == [
        row[m].tolist() for row, m in zip(values, mask)
    ]
    torch.testing.assert_close(reopen_holes(closed, ranks) * mask, values)


def test_sessions_share_the_outcome_of_their_last_row() -> None:
    rewards = torch.tensor([[9.0, 0], [0, 1.0], [0, 0], [0, 3.0]])
    made = estimate_over_sessions(
        "dr_grpo",
        rewards=rewards,
        mask=torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]]),
        sessions=torch.tensor([4, 4, 8, 6]),
        order=torch.tensor([0, 1, 0, 0]),
        groups=torch.tensor([0, 0, 0, 1]),
    )
    assert made.advantages.tolist() == [[0.5, 0.5], [0.5, 0.5], [-0.5, 0.0], [3.0, 3.0]]
