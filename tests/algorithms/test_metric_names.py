"""Every metric name of verl's log that the algorithms make, so that dashboards keep working."""

from __future__ import annotations

import torch

from strop.algorithms.losses import value_loss
from strop.algorithms.metrics.training import (
    data_metrics,
    probability_drift,
    throughput_metrics,
    timing_metrics,
)
from strop.algorithms.metrics.validation import name_validation_metrics, validation_metrics
from strop.algorithms.policy_losses.clipped import policy_loss
from strop.algorithms.rollout_correction import CRITERIA, correct_rollout
from strop.data.balance import imbalance_metrics
from tests.algorithms.reference.agent_timing import agent_timing_metrics
from tests.algorithms.reference.variance_metrics import variance_proxy_metrics


def spread(*names: str, of: tuple[str, ...] = ("mean", "max", "min")) -> set[str]:
    return {f"{name}/{how}" for name in names for how in of}


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    old = -torch.rand(4, 5)
    return old, (old + 0.1 * torch.randn(4, 5)).clamp(max=0), torch.ones(4, 5)


def test_names_of_a_training_batch() -> None:
    old, new, mask = tensors()
    made = data_metrics(
        token_level_scores=old,
        token_level_rewards=old,
        advantages=new,
        returns=new,
        response_mask=mask,
        prompt_lengths=torch.tensor([1, 2, 3, 3]),
        response_lengths=torch.tensor([5, 5, 5, 5]),
        max_prompt_length=3,
        max_response_length=5,
        values=old,
        num_turns=[1, 2, 1, 1],
        tool_call_counts=[0, 1, 0, 0],
    )
    expected = spread(*(f"critic/{name}" for name in ("score", "rewards", "advantages", "returns", "values")))
    lengths = ("response_length", "response_length_non_aborted", "prompt_length")
    expected |= spread(*lengths, of=("mean", "max", "min", "clip_ratio")) | spread(
        "num_turns", "tool_call_counts"
    )
    expected |= {"critic/vf_explained_var", "response/aborted_ratio"}
    assert set(made) == expected


def test_names_of_updates_and_drift() -> None:
    old, new, mask = tensors()
    made = policy_loss("vanilla", log_probs=new, old_log_probs=old, advantages=new, mask=mask)
    assert set(made.metrics) == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    assert set(value_loss(new, old, old, mask).metrics) == {"vf_clipfrac"}
    expected = {f"training/rollout_probs_diff_{name}" for name in ("valid", "max", "mean", "std")}
    assert set(probability_drift(old, new, mask)) == expected | {"training/rollout_actor_probs_pearson_corr"}
    proxies = {
        "proxy1_signal_strength",
        "proxy2_total_power",
        "proxy3_pure_noise",
        "expected_a_squared",
        "expected_w",
    }
    variance = variance_proxy_metrics(
        old_log_probs=old, sum_pi_squared=new.exp(), advantages=new, response_mask=mask, grad_norm=1.0
    )
    assert set(variance) == {f"variance_proxy/{name}" for name in proxies}


def test_names_of_time_and_balance() -> None:
    phases = "step gen reward old_log_prob ref values adv update_critic update_actor update_weights testing save_checkpoint"
    made = timing_metrics(dict.fromkeys(phases.split(), 1.0), response_tokens=10, total_tokens=20)
    per_token = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
    assert set(made) == {f"timing_s/{p}" for p in phases.split()} | {
        f"timing_per_token_ms/{p}" for p in per_token
    }
    throughput = throughput_metrics(total_tokens=9, step_seconds=1.0, devices=1)
    assert set(throughput) == {"perf/total_num_tokens", "perf/time_per_step", "perf/throughput"}
    agents = agent_timing_metrics(
        generate_sequences=[1.0],
        tool_calls=[1.0],
        prompt_lengths=[1],
        response_lengths=[1],
        num_preempted=[0],
    )
    parts = ("num_preempted", "generate_sequences", "tool_calls")
    expected = spread(*(f"timing_s/agent_loop/{part}" for part in parts))
    expected |= {
        f"timing_s/agent_loop/slowest/{name}" for name in (*parts, "prompt_length", "response_length")
    }
    assert set(agents) == expected
    balance = {"min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean"}
    assert set(imbalance_metrics([1, 2], [[0], [1]])) == {f"global_seqlen/{name}" for name in balance}


def test_names_of_rollout_correction() -> None:
    old, new, mask = tensors()
    made = correct_rollout(
        new,
        old,
        mask,
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs=",".join(CRITERIA),
        rollout_rs_threshold=2.0,
    ).metrics
    mismatch = (
        "training_ppl training_log_ppl rollout_ppl rollout_log_ppl kl k3_kl log_ppl_diff log_ppl_abs_diff"
    )
    mismatch += " log_ppl_diff_max log_ppl_diff_min ppl_ratio chi2_token chi2_seq"
    weights = "mean max min std eff_sample_size ratio_fraction_high ratio_fraction_low seq_mean seq_std seq_max seq_min"
    weights += " seq_max_deviation seq_fraction_high seq_fraction_low batch_norm_factor"
    rejection = (
        "mean max min std fraction_high fraction_low seq_mean seq_std seq_max seq_min seq_max_deviation"
    )
    rejection += " seq_fraction_high masked_fraction seq_masked_fraction"
    expected = set(mismatch.split()) | {f"rollout_is_{name}" for name in weights.split()}
    expected |= {f"rollout_rs_{criterion}_{name}" for criterion in CRITERIA for name in rejection.split()}
    expected |= {
        f"rollout_rs_{criterion}_seq_fraction_low" for criterion in CRITERIA if criterion.endswith("k1")
    }
    expected |= {"rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"}
    assert set(made) == {f"rollout_corr/{name}" for name in expected}


def test_names_of_validation() -> None:
    found = validation_metrics(
        ["s"] * 4, ["p"] * 4, {"reward": [0.0, 1, 1, 0], "acc": [0, 1, 1, 0], "pred": list("abba")}
    )
    made = set(name_validation_metrics(found))
    assert {"val-core/s/acc/mean@4", "val-core/s/acc/best@4/mean", "val-core/s/acc/maj@4/mean"} <= made
    aux = {
        f"val-aux/s/{v}/{m}@2/{how}"
        for v in ("acc", "reward")
        for m in ("best", "worst", "maj")
        for how in ("mean", "std")
    }
    aux |= {
        "val-aux/s/acc/std@4",
        "val-aux/s/acc/worst@4/mean",
        "val-aux/s/reward/mean@4",
        "val-aux/s/reward/best@4/mean",
    }
    assert aux <= made
