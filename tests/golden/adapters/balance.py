"""verl's and OpenRLHF's sequence balancing."""

from __future__ import annotations

from typing import Any

from strop.data.balance import (
    balanced_partitions,
    imbalance_metrics,
    karmarkar_karp,
    micro_batches,
    workload,
)
from tests.algorithms.reference.partitions import (
    first_fit_count,
    greedy_partition,
    group_balanced_partitions,
    inverse_permutation,
    restore_order,
)
from tests.golden.harness import Case, adapts

VERL = "verl.utils.seqlen_balancing."
OPENRLHF = "openrlhf.utils.seqlen_balancing."


@adapts(
    VERL + "karmarkar_karp",
    VERL + "greedy_partition",
    *(p + "get_seqlen_balanced_partitions" for p in (VERL, OPENRLHF)),
)
def partitions(case: Case) -> dict[str, Any]:
    divide = {"karmarkar_karp": karmarkar_karp, "greedy_partition": greedy_partition}.get(
        case.function.rpartition(".")[2], balanced_partitions
    )
    return {
        "partitions": divide(
            case.inputs["seqlen_list"], case.kwargs["k_partitions"], equal_size=case.kwargs["equal_size"]
        )
    }


@adapts(OPENRLHF + "get_minimum_num_micro_batch_size")
def minimum_count(case: Case) -> dict[str, Any]:
    budget = (
        case.kwargs["max_tokens_per_gpu"]
        * case.kwargs["ring_attn_size"]
        * case.kwargs["ds_tensor_parallel_size"]
    )
    return {"num": first_fit_count(case.inputs["total_lengths"], budget)}


@adapts(VERL + "calculate_workload")
def cost(case: Case) -> dict[str, Any]:
    return {"workload": workload(case.inputs["seqlen"])}


@adapts(VERL + "get_group_balanced_partitions")
def groups(case: Case) -> dict[str, Any]:
    made = group_balanced_partitions(
        case.inputs["seqlen_list"], case.inputs["uid_list"], case.kwargs["k_partitions"]
    )
    return {"partitions": made}


@adapts(VERL + "rearrange_micro_batches", VERL + "prepare_dynamic_batch")
def dynamic(case: Case) -> dict[str, Any]:
    lengths, settings = case.inputs["seqlen_list"], case.kwargs
    parts = micro_batches(
        lengths,
        settings["max_token_len"],
        min_count=settings.get("min_num_micro_batch", 1),
        count_multiple=settings.get("num_batches_divided_by", 1),
        group_size=settings.get("force_group_size", 1),
        padded_width=None if settings.get("nested", True) else settings["padded_len"],
        light_ends=settings.get("use_dynamic_bsz_balance", True),
    )
    return {
        "micro_batch_indices": parts,
        "tokens_per_micro_batch": [sum(lengths[row] for row in part) for part in parts],
        "batch_idx_list": parts,
        "uids": [[f"u{row}" for row in part] for part in parts],
    }


@adapts(VERL + "get_reverse_idx")
def reverse(case: Case) -> dict[str, Any]:
    return {"reverse": inverse_permutation(case.inputs["idx_map"])}


@adapts(VERL + "restore_dynamic_batch")
def restore(case: Case) -> dict[str, Any]:
    return {"restored": case.tensor("data")[restore_order(case.inputs["batch_idx_list"])]}


@adapts(VERL + "log_seqlen_unbalance")
def imbalance(case: Case) -> dict[str, Any]:
    return {
        "metrics": imbalance_metrics(
            case.inputs["seqlen_list"], case.inputs["partitions"], prefix=case.kwargs["prefix"]
        )
    }
