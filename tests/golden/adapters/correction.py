"""verl's rollout correction."""

from __future__ import annotations

from typing import Any

from strop.algorithms.rollout_correction import (
    correct_rollout,
    importance_weights,
    parse_band,
    rejection_mask,
)
from strop.algorithms.rollout_diagnostics import mismatch_metrics
from tests.golden.harness import Case, adapts, peer

HELPER = "verl.trainer.ppo.rollout_corr_helper"


@adapts(f"{HELPER}.compute_rollout_correction_weights")
def compute_rollout_correction_weights(case: Case) -> dict[str, Any]:
    weights, metrics = importance_weights(
        case.tensor("log_ratio"),
        case.tensor("response_mask"),
        level=case.kwargs["rollout_is"],
        normalize=case.kwargs.get("rollout_is_batch_normalize", False),
        **parse_band(case.kwargs["rollout_is_threshold"])._asdict(),
    )
    if metrics["rollout_is_eff_sample_size"] == 0 and peer(True, False):
        raise ZeroDivisionError(
            "verl divides by the mean weight, which is zero when the band drops every token"
        )
    return {"rollout_is_weights": weights, "metrics": metrics}


@adapts(f"{HELPER}.compute_rollout_rejection_mask")
def compute_rollout_rejection_mask(case: Case) -> dict[str, Any]:
    kept, metrics = rejection_mask(
        case.tensor("log_ratio"),
        case.tensor("response_mask"),
        criteria=case.kwargs["rollout_rs"],
        threshold=case.kwargs["rollout_rs_threshold"],
    )
    return {"modified_response_mask": kept, "metrics": metrics}


@adapts(f"{HELPER}.compute_rollout_correction_and_rejection_mask")
def compute_rollout_correction_and_rejection_mask(case: Case) -> dict[str, Any]:
    found = correct_rollout(
        case.tensor("old_log_prob"),
        case.tensor("rollout_log_prob"),
        case.tensor("response_mask"),
        **case.kwargs,
    )
    return {
        "modified_response_mask": found.mask,
        "metrics": found.metrics,
        "rollout_is_weights": found.weights,
    }


@adapts(f"{HELPER}.compute_offpolicy_metrics")
def compute_offpolicy_metrics(case: Case) -> dict[str, Any]:
    rollout = case.tensor("rollout_log_prob") if "rollout_log_prob" in case.inputs else None
    return {"metrics": mismatch_metrics(case.tensor("old_log_prob"), rollout, case.tensor("response_mask"))}
