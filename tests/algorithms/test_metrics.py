"""Metrics against hand-made numbers and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.metrics.training import (
    data_metrics,
    explained_variance,
    probability_drift,
    throughput_metrics,
    timing_metrics,
)
from strop.algorithms.metrics.validation import (
    best_of,
    majority_of,
    name_validation_metrics,
    subset_sizes,
    summarise,
    validation_metrics,
    worst_of,
)
from strop.types import Prompt, Trajectory
from tests.algorithms.reference.agent_timing import agent_timing_metrics
from tests.algorithms.reference.engine_metrics import moe_load_metrics, spec_decode_metrics
from tests.algorithms.reference.metric_reduction import aggregate_over_ranks, reduce_metrics, reduction_of
from tests.algorithms.reference.validation import pass_at_k
from tests.algorithms.reference.variance_metrics import variance_proxy_metrics


def batch(**changes: object) -> dict[str, object]:
    rows, width = 3, 4
    made: dict[str, object] = {
        "token_level_scores": torch.tensor([[0.0, 1.0, 0, 0], [0, 0, 0, 3.0], [9.0, 9, 9, 9]]),
        "token_level_rewards": torch.zeros(rows, width),
        "advantages": torch.full((rows, width), float("nan")),
        "returns": torch.ones(rows, width),
        "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]),
        "prompt_lengths": torch.tensor([2, 5, 5]),
        "response_lengths": torch.tensor([2, 4, 0]),
        "max_prompt_length": 5,
        "max_response_length": 4,
    }
    advantages = made["advantages"]
    assert isinstance(advantages, torch.Tensor)
    advantages[torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()] = torch.tensor(
        [1.0, 2, 3, 4, 5]
    )
    return made | changes


def test_aborted_rows_and_masked_tokens_stay_out() -> None:
    metrics = data_metrics(**batch())  # type: ignore[arg-type]
    assert metrics["critic/score/mean"] == 2.0 and metrics["critic/score/max"] == 3.0
    assert metrics["critic/advantages/mean"] == 3.0, "NaN outside the mask must not leak"
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length/mean"] == 2.0 and metrics["response_length_non_aborted/mean"] == 3.0
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(2 / 3)
    assert not any("values" in name or "num_turns" in name for name in metrics)


def test_critic_turns_and_a_batch_of_nothing() -> None:
    metrics = data_metrics(**batch(values=torch.zeros(3, 4), num_turns=[2, 4, 3], tool_call_counts=[0, 1, 0]))  # type: ignore[arg-type]
    assert metrics["num_turns/max"] == 4 and metrics["tool_call_counts/mean"] == pytest.approx(1 / 3)
    assert metrics["num_turns/min"] == 2 and metrics["num_turns/mean"] == 3
    assert metrics["critic/vf_explained_var"] == 1.0
    for count, known in ((2, True), (1, False)):
        few = (torch.arange(12).view(3, 4) < count).long()
        found = data_metrics(**batch(response_mask=few, values=torch.zeros(3, 4)))  # type: ignore[arg-type]
        assert ("critic/vf_explained_var" in found) == known, "one value has no variance"
    nothing = data_metrics(**batch(response_lengths=torch.zeros(3), response_mask=torch.zeros(3, 4)))  # type: ignore[arg-type]
    assert "critic/score/mean" not in nothing and nothing["response/aborted_ratio"] == 1.0
    assert all(math.isfinite(value) for value in nothing.values())


def test_rows_that_disagree_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"`prompt_lengths` has shape \(2,\), but token_level_scores has \(3, 4\)"
    ):
        data_metrics(**batch(prompt_lengths=torch.ones(2)))  # type: ignore[arg-type]


def test_explained_variance_of_a_perfect_and_a_constant_critic() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0.0, abs=1e-4)


def test_drift_is_measured_on_probabilities_inside_the_mask() -> None:
    ours, theirs = torch.tensor([[0.5, 0.2, 0.9]]).log(), torch.tensor([[0.4, 0.2, 0.1]]).log()
    metrics = probability_drift(theirs, ours, torch.tensor([[1, 1, 0]]))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.05)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.1 / 2**0.5)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    assert probability_drift(theirs, ours, torch.zeros(1, 3)) == {"training/rollout_probs_diff_valid": 0.0}


def test_names_are_reduced_by_words() -> None:
    metrics = {
        "x/max": [1, 5],
        "diff_min": [2, 1],
        "admin": [1.0, 3.0],
        "maximum_len": [1.0, 3.0],
        "lr": 0.1,
        "empty": [],
    }
    assert reduce_metrics(metrics) == {"x/max": 5, "diff_min": 1, "admin": 2.0, "maximum_len": 2.0, "lr": 0.1}
    assert (
        reduction_of("admin", compat="verl") == "min" and reduction_of("maximum_len", compat="verl") == "max"
    )


def test_uneven_ranks_average_over_all_values() -> None:
    assert aggregate_over_ranks([[1.0, 2.0, 3.0], [10.0]], "mean") == 4.0
    assert aggregate_over_ranks([[1.0, 2.0], [3.0]], "sum") == 3.0
    with pytest.raises(ValueError, match="not 'median'"):
        aggregate_over_ranks([[1.0]], "median")


def test_timing_and_throughput() -> None:
    metrics = timing_metrics({"gen": 2.0, "adv": 1.0, "reward": 5.0}, response_tokens=100, total_tokens=500)
    assert metrics["timing_per_token_ms/gen"] == 20.0 and metrics["timing_per_token_ms/adv"] == 2.0
    assert metrics["timing_s/reward"] == 5.0 and "timing_per_token_ms/reward" not in metrics
    assert "timing_per_token_ms/gen" not in timing_metrics({"gen": 2.0}, response_tokens=0, total_tokens=0)
    assert throughput_metrics(total_tokens=100, step_seconds=2.0, devices=5)["perf/throughput"] == 10.0
    one = timing_metrics({"gen": 2.0, "adv": 1.0}, response_tokens=1, total_tokens=1)
    assert one["timing_per_token_ms/gen"] == 2000.0 and one["timing_per_token_ms/adv"] == 1000.0
    for devices, seconds in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match=f"got {devices} and {seconds}"):
            throughput_metrics(total_tokens=1, step_seconds=seconds, devices=devices)


def test_the_slowest_episode_is_portrayed() -> None:
    metrics = agent_timing_metrics(
        generate_sequences=[1.0, 2.0],
        tool_calls=[5.0, 0.5],
        prompt_lengths=[7, 8],
        response_lengths=[70, 80],
        num_preempted=[0, 1],
    )
    assert metrics["timing_s/agent_loop/slowest/response_length"] == 70
    assert (
        metrics["timing_s/agent_loop/tool_calls/max"] == 5.0
        and metrics["timing_s/agent_loop/num_preempted/mean"] == 0.5
    )


scores = st.lists(st.floats(-5, 5), min_size=1, max_size=7)


@given(scores, st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_best_and_worst_equal_brute_force(values: list[float], size: int) -> None:
    size = min(size, len(values))
    maxima = [max(subset) for subset in itertools.combinations(values, size)]
    minima = [min(subset) for subset in itertools.combinations(values, size)]
    assert best_of(values, size) == pytest.approx((np.mean(maxima), np.std(maxima)), abs=1e-7)
    assert worst_of(values, size) == pytest.approx((np.mean(minima), np.std(minima)), abs=1e-7)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_pass_at_k_is_the_published_formula(count: int, correct: int, k: int) -> None:
    correct, k = min(correct, count), min(k, count)
    assert pass_at_k(count, correct, k) == pytest.approx(
        1 - math.comb(count - correct, k) / math.comb(count, k)
    )


def test_exact_best_of_all_is_the_maximum_where_the_bootstrap_is_not() -> None:
    arguments = (["s"] * 4, ["p"] * 4, {"acc": [1.0, 0.0, 0.0, 0.0], "pred": ["a", "b", "b", "c"]})
    exact = validation_metrics(*arguments)["s"]["acc"]
    assert exact["best@4/mean"] == exact["pass@4"] == 1.0 and exact["best@4/std"] == 0.0
    assert exact["maj@4/mean"] == 0.0
    assert exact["pass@2"] == 0.5
    bootstrapped = validation_metrics(*arguments, estimator="bootstrap")["s"]["acc"]
    assert bootstrapped["best@4/mean"] < 0.75 and "pass@4" not in bootstrapped


def test_majority_over_subsets_by_hand() -> None:
    mean, _ = majority_of([1.0, 0.0, 1.0], ["x", "y", "x"], 3)
    assert mean == 1.0
    mean, _ = majority_of([1.0, 0.0, 1.0], ["x", "y", "x"], 2)
    assert mean == pytest.approx(2 / 3)  # {x,y} -> x, {x,x} -> x, {y,x} -> y


def test_validation_groups_by_source_and_prompt_and_skips_text() -> None:
    metrics = validation_metrics(
        ["a", "b", "a", "b"],
        [0, 0, 0, 0],
        {"reward": [1.0, 0.0, 0.0, 0.5], "note": ["x", "y", "z", "w"], "flag": [True, False, True, True]},
    )
    assert metrics["a"]["reward"]["mean@2"] == 0.5 and metrics["b"]["reward"]["mean@2"] == 0.25
    assert "note" not in metrics["a"] and metrics["b"]["flag"]["pass@2"] == 1.0
    assert "pass@2" not in metrics["b"]["reward"], "0.5 is no pass or fail"


def test_pass_at_k_is_not_that_of_prompts_whose_scores_happen_to_be_0_and_1() -> None:
    scores = {"reward": [0.0, 1.0, 0.0, 0.25, -0.5, -0.5]}
    found = validation_metrics(["a"] * 6, [0, 0, 1, 1, 2, 2], scores)["a"]["reward"]
    assert found["best@2/mean"] == pytest.approx(0.75 / 3) and "pass@2" not in found


def trajectories_with(scores: list[list[float | None]]) -> list[Trajectory]:
    """The samples of one prompt per list; None: it could not be scored."""
    made = []
    for group, of_prompt in enumerate(scores):
        prompt = Prompt(group, [1], [], "s")
        for score in of_prompt:
            extras = {} if score is None else {"acc": score}
            made.append(Trajectory(prompt, group, [5], [1], [0.0], score=score, extras=extras))
    return made


def test_a_failed_sample_does_not_take_its_prompt_out_of_the_mean() -> None:
    """Prompts without any failure are other prompts: easier ones, or those of an environment that works."""
    found = summarise(
        trajectories_with([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, None], [None, None, None, 1.0]])
    )
    assert found["val-aux/failed"] == 4
    assert found["val-core/s/acc/mean@4"] == pytest.approx((1 + 0 + 1) / 3)
    assert found["val-core/s/acc/pass@4"] == 1.0, "of the one prompt that has four"
    assert found["val-aux/s/acc/pass@2"] == pytest.approx((1 + 0) / 2)
    assert not any(f"@{count}" in name for name in found for count in (1, 3))
    alone = summarise(trajectories_with([[1.0, None], [None, 0.0]]))
    assert alone["val-core/s/acc/mean@2"] == 0.5, "under the same name as in other validations"
    assert summarise(trajectories_with([[None], [None]])) == {"val-aux/failed": 2}


def test_what_some_scores_reported_and_the_turns_of_conversations_are_summarised() -> None:
    made = trajectories_with([[1.0], [0.0], [1.0]])
    for t, turns, extras in zip(made, (2, 6, 4), ({"steps": 3}, {}, {"steps": 5, "reward": 9.0})):
        t.num_turns, t.extras = turns, extras
    made[0].extras["trace"] = ["not a number"]
    found = summarise(made)
    assert found["val-aux/s/steps/mean@1"] == 4.0, "of those that have one"
    assert found["val-core/s/reward/mean@1"] == pytest.approx(2 / 3), "the score, not what is called so"
    assert not any("trace" in name for name in found)
    turns = [found[f"val-aux/num_turns/{which}"] for which in ("min", "max", "mean")]
    assert turns == [2, 6, 4]


def test_votes_and_values_of_different_responses_are_not_paired() -> None:
    """The first response has no value and the last one no vote: as many of both, but not of the same."""
    variables = {"acc": [None, 1.0, 0.0, 0.0], "pred": ["a", "b", "a", None]}
    found = validation_metrics(["s"] * 4, ["p"] * 4, variables)["s"]["acc"]
    assert found["mean@3"] == pytest.approx(1 / 3) and not any(name.startswith("maj@") for name in found)


def test_a_variable_with_texts_and_numbers_counts_as_text() -> None:
    variables = {"reward": [1.0, 0.0, 1.0], "pred": [42, "none", 7]}
    found = validation_metrics(["a", "a", "a"], ["p", "p", "q"], variables)
    assert set(found["a"]) == {"reward"} and "maj@2/mean" in found["a"]["reward"]


def test_core_names() -> None:
    metrics = {
        "gsm8k": {
            "acc": {"mean@4": 0.5, "std@4": 0.1, "best@2/mean": 0.6, "best@4/mean": 0.9, "maj@4/mean": 0.5},
            "reward": {"mean@4": 1.0},
        }
    }
    named = name_validation_metrics(metrics)
    assert {name for name in named if name.startswith("val-core")} == {
        "val-core/gsm8k/acc/mean@4",
        "val-core/gsm8k/acc/best@4/mean",
        "val-core/gsm8k/acc/maj@4/mean",
    }
    assert named["val-aux/gsm8k/reward/mean@4"] == 1.0
    assert "val-core/s/reward/mean@1" in name_validation_metrics({"s": {"reward": {"mean@1": 0.0}}})


def test_validation_errors() -> None:
    assert subset_sizes(1) == [] and subset_sizes(5) == [2, 4, 5] and subset_sizes(8) == [2, 4, 8]
    with pytest.raises(ValueError, match="`acc` has 1 entries, `data_sources` 2"):
        validation_metrics(["a", "a"], [0, 1], {"acc": [1.0]})
    with pytest.raises(ValueError, match="best of 5 cannot be computed from 2"):
        best_of([1.0, 2.0], 5)
    with pytest.raises(ValueError, match="not 'guess'"):
        validation_metrics([], [], {}, estimator="guess")


def test_expert_load_of_a_perfect_router_is_flat() -> None:
    routed = torch.tensor([[[[0]], [[0]], [[1]], [[1]]]])
    metrics = moe_load_metrics(routed, torch.tensor([[1, 1, 1]]), 2)
    assert metrics["rollout/moe/max_vio/layer_0"] == 0.0 and metrics["rollout/moe/avg_vio/avg"] == 0.0
    assert moe_load_metrics(routed, torch.tensor([[0, 0, 1]]), 2) == {}
    with pytest.raises(ValueError, match="rows must agree"):
        moe_load_metrics(routed, torch.ones(2, 3), 2)


def test_speculation_counts_the_verified_token_itself() -> None:
    metrics = spec_decode_metrics([4], [2], [2])
    assert metrics == {"rollout/spec_accept_rate": 0.5, "rollout/spec_accept_length": 2.0}
    assert spec_decode_metrics([], [], []) == {}


def test_variance_proxy_of_a_deterministic_policy_is_zero() -> None:
    shape = (3, 5)
    metrics = variance_proxy_metrics(
        old_log_probs=torch.zeros(shape),
        sum_pi_squared=torch.ones(shape),
        advantages=torch.randn(shape),
        response_mask=torch.ones(shape),
        grad_norm=0.0,
    )
    assert metrics["variance_proxy/proxy2_total_power"] == 0.0 and metrics["variance_proxy/expected_w"] == 0.0
