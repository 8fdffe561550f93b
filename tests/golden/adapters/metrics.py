"""verl's data, timing and validation metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from strop.algorithms.metrics.training import data_metrics, throughput_metrics, timing_metrics
from strop.algorithms.metrics.validation import bootstrap, validation_metrics
from tests.algorithms.reference.engine_metrics import moe_load_metrics, spec_decode_metrics
from tests.algorithms.reference.metric_reduction import aggregate_over_ranks, aggregate_rank, reduce_metrics
from tests.algorithms.reference.validation import majority_value
from tests.algorithms.reference.variance_metrics import variance_proxy_metrics
from tests.golden.harness import Case, adapts, peer

VERL = "verl.trainer.ppo.metric_utils."


@adapts(VERL + "process_validation_metrics")
def validation(case: Case) -> dict[str, Any]:
    expected = {(source, uid): count for source, uid, count in case.kwargs.get("expected_acc_counts", [])}
    metrics = validation_metrics(
        case.inputs["data_sources"],
        case.inputs["sample_uids"],
        case.inputs["infos_dict"],
        estimator=peer("bootstrap", "exact"),
        seed=case.kwargs.get("seed", 42),
        expected_acc_counts=expected,
    )
    return {"metrics": metrics}


@adapts(VERL + "bootstrap_metric")
def bootstrapped(case: Case) -> dict[str, Any]:
    reducers = [getattr(np, name) for name in case.kwargs["reduce"]]
    size, draws, seed = (case.kwargs[name] for name in ("subset_size", "n_bootstrap", "seed"))
    return {"mean_std": bootstrap(case.inputs["data"], size, reducers, draws=draws, seed=seed)}


@adapts(VERL + "calc_maj_val")
def majority(case: Case) -> dict[str, Any]:
    data = case.inputs["data"]
    return {"value": majority_value([row["val"] for row in data], [row["pred"] for row in data])}


@adapts(VERL + "compute_data_metrics")
def data(case: Case) -> dict[str, Any]:
    responses, prompts, attention = (case.tensor(name) for name in ("responses", "prompts", "attention_mask"))
    width = responses.shape[1]
    metrics = data_metrics(
        token_level_scores=case.tensor("token_level_scores"),
        token_level_rewards=case.tensor("token_level_rewards"),
        advantages=case.tensor("advantages"),
        returns=case.tensor("returns"),
        response_mask=case.tensor("response_mask"),
        prompt_lengths=attention[:, :-width].sum(-1),
        response_lengths=attention[:, -width:].sum(-1),
        max_prompt_length=prompts.shape[1],
        max_response_length=width,
        values=case.tensor("values") if case.kwargs["use_critic"] else None,
        num_turns=case.inputs.get("__num_turns__"),
        tool_call_counts=case.inputs.get("tool_call_counts"),
    )
    assert case.kwargs["use_critic"] == ("critic/vf_explained_var" in metrics)
    return {"metrics": metrics}


@adapts(VERL + "compute_timing_metrics")
def timing(case: Case) -> dict[str, Any]:
    attention, width = case.tensor("attention_mask"), len(case.inputs["responses"][0])
    response = int(attention[:, -width:].sum())
    return {
        "metrics": timing_metrics(
            case.kwargs["timing_raw"], response_tokens=response, total_tokens=int(attention.sum())
        )
    }


@adapts(VERL + "compute_throughout_metrics")
def throughput(case: Case) -> dict[str, Any]:
    tokens, seconds = sum(case.inputs["global_token_num"]), case.kwargs["timing_raw"]["step"]
    return {
        "metrics": throughput_metrics(
            total_tokens=tokens, step_seconds=seconds, devices=case.kwargs["n_gpus"]
        )
    }


@adapts(VERL + "compute_variance_proxy_metrics")
def variance(case: Case) -> dict[str, Any]:
    tensors = {name: case.tensor(name) for name in case.inputs}
    return {"metrics": variance_proxy_metrics(grad_norm=case.kwargs["gradient_norm"], **tensors)}


@adapts(VERL + "compute_rollout_moe_load_balance_metrics")
def moe(case: Case) -> dict[str, Any]:
    return {
        "metrics": moe_load_metrics(
            case.tensor("routed_experts"), case.tensor("response_mask"), case.kwargs["num_experts"]
        )
    }


@adapts("verl.trainer.ppo.ray_trainer.compute_spec_decode_metrics")
def spec_decode(case: Case) -> dict[str, Any]:
    return {"metrics": spec_decode_metrics(**case.inputs)}


@adapts("verl.utils.metric.utils.reduce_metrics")
def reduce(case: Case) -> dict[str, Any]:
    return {"metrics": reduce_metrics(case.inputs["metrics"], compat=peer("verl", None))}


@adapts("verl.utils.metric.utils.Metric.aggregate_dp")
def ranks(case: Case) -> dict[str, Any]:
    values, how = case.inputs["values"], case.kwargs["aggregation"]
    return {
        "value": aggregate_over_ranks(values, how),
        "per_rank": [aggregate_rank(rank, how) for rank in values],
    }
