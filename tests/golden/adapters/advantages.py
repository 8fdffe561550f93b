"""Advantage estimators, grouping, and OpenRLHF's road from a score to advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.algorithms.advantages.base import (
    AdvantageResult,
    estimate,
    group_ids,
    group_size,
    group_statistics,
)
from strop.algorithms.advantages.outcome import centred_scores, standardised_scores
from strop.algorithms.advantages.returns import gae, reinforce, returns_to_go
from strop.algorithms.reward_shaping import overlong_penalty, truncation_penalty
from strop.algorithms.selection import pf_ppo_weights, resample_rows
from tests.algorithms.reference.sessions import estimate_over_sessions
from tests.algorithms.reference.terminal_rewards import terminal_rewards
from tests.golden.harness import Case, adapts, peer

CORE = "verl.trainer.ppo.core_algos."
MAKER = "openrlhf.trainer.ppo_utils.experience_maker.RemoteExperienceMaker."
RENAMED = {"norm_adv_by_std_in_grpo": "norm_by_std", "epsilon": "eps"}


def as_dict(result: AdvantageResult) -> dict[str, Tensor]:
    return {"advantages": result.advantages, "returns": result.returns}


def verl_arguments(case: Case) -> dict[str, Any]:
    settings = {**case.kwargs, **case.kwargs.get("config", {})}
    arguments: dict[str, Any] = {RENAMED.get(key, key): value for key, value in settings.items()}
    arguments.pop("adv_estimator", None)
    arguments |= {
        "rewards": case.tensor("token_level_rewards"),
        "mask": case.tensor("response_mask"),
        "compat": peer("verl", None),
    }
    if "index" in case.inputs:
        arguments["groups"] = group_ids(case.inputs["index"])
    for name in ("values", "reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights"):
        if name in case.inputs:
            arguments[name] = case.tensor(name)
    return arguments


@adapts(CORE + "compute_gae_advantage_return")
def generalised(case: Case) -> dict[str, Tensor]:
    return as_dict(estimate("gae", **verl_arguments(case)))


@adapts(
    CORE + "compute_grpo_outcome_advantage",
    CORE + "compute_grpo_vectorized_outcome_advantage",
    CORE + "compute_grpo_passk_outcome_advantage",
    CORE + "compute_reinforce_plus_plus_baseline_outcome_advantage",
    CORE + "compute_rloo_outcome_advantage",
    CORE + "compute_rloo_vectorized_outcome_advantage",
    CORE + "compute_opo_outcome_advantage",
    CORE + "compute_gpg_outcome_advantage",
    CORE + "compute_reinforce_plus_plus_outcome_advantage",
    CORE + "compute_remax_outcome_advantage",
    CORE + "compute_optimal_token_baseline_advantage",
    CORE + "compute_multi_turn_optimal_token_baseline_advantage",
)
def by_name(case: Case) -> dict[str, Tensor]:
    return as_dict(estimate(case.kwargs["adv_estimator"], **verl_arguments(case)))


@adapts(CORE + "compute_gdpo_outcome_advantage")
def gdpo(case: Case) -> dict[str, Tensor]:
    arguments = verl_arguments(case)
    config = case.kwargs.get("config", {})
    if keys := config.get("gdpo_reward_keys"):
        arguments["reward_components"] = torch.stack(
            [torch.tensor(case.inputs["gdpo_rewards"][key]) for key in keys], dim=1
        )
    if weights := config.get("gdpo_reward_weights"):
        arguments["component_weights"] = torch.tensor(weights)
    return as_dict(estimate("gdpo", **arguments))


@adapts("verl.trainer.ppo.v1.utils.compute_advantage_for_multi_trajectories")
def sessions(case: Case) -> dict[str, Tensor]:
    keys = [key.rpartition("_") for key in case.inputs["batch_keys"]]
    result = estimate_over_sessions(
        case.kwargs["adv_estimator"],
        rewards=case.tensor("token_level_rewards"),
        mask=case.tensor("response_mask"),
        sessions=group_ids([session for session, _, _ in keys]),
        order=torch.tensor([int(place) for _, _, place in keys]),
        groups=group_ids(case.inputs["uid"]),
        norm_by_std=case.kwargs["norm_adv_by_std_in_grpo"],
    )
    return as_dict(result)


@adapts("verl.utils.groupwise.as_torch_index")
def labels(case: Case) -> dict[str, Tensor]:
    return {"gidx": group_ids(case.inputs["index"], compact=peer(False, True))}


@adapts("verl.utils.groupwise.group_mean_std")
def statistics(case: Case) -> dict[str, Tensor]:
    groups = case.tensor("gidx")
    made = group_statistics(case.tensor("scores"), groups, variance_floor=case.kwargs["eps"])
    return {"mean": made.mean, "std": made.std, "count": made.size}


@adapts(CORE + "compute_pf_ppo_reweight_data")
def reweight(case: Case) -> dict[str, Tensor]:
    scores = case.tensor("token_level_scores").sum(-1)
    weights = pf_ppo_weights(scores, method=case.kwargs["reweight_method"], power=case.kwargs["weight_pow"])
    torch.manual_seed(case.kwargs["torch_seed"])
    return {"sampled_rows": resample_rows(weights)}


def openrlhf_gaps() -> dict[str, Any]:
    return {"skip_gaps": peer(False, True), "compat": peer("openrlhf", None)}


@adapts(MAKER + "get_advantages_and_returns")
def openrlhf_gae(case: Case) -> dict[str, Tensor]:
    rewards = case.tensor("rewards")
    mask = case.tensor("action_mask") if "action_mask" in case.inputs else torch.ones_like(rewards)
    gamma, lam = case.kwargs["gamma"], case.kwargs["lambd"]
    values = case.tensor("values")
    return as_dict(
        gae(rewards, mask, values=values, gamma=gamma, lam=lam, normalisation="none", **openrlhf_gaps())
    )


@adapts(MAKER + "get_cumulative_returns")
def openrlhf_returns(case: Case) -> dict[str, Tensor]:
    rewards, mask = case.tensor("rewards"), case.tensor("action_mask")
    return {"returns": returns_to_go(rewards, mask, gamma=case.kwargs["gamma"], **openrlhf_gaps())}


@adapts("openrlhf.trainer.ppo_utils.length_penalty.apply_length_penalties")
def length_penalties(case: Case) -> dict[str, Tensor]:
    scores, settings = case.tensor("rewards"), case.kwargs
    if "overlong_buffer_len" in settings:
        scores = scores + overlong_penalty(
            case.tensor("response_length"),
            max_length=settings["max_new_tokens"],
            buffer=settings["overlong_buffer_len"],
            factor=settings.get("overlong_penalty_factor", 1.0),
            capped=peer(True, False),
        )
    if "stop_properly_penalty_coef" in settings:
        scores = truncation_penalty(
            scores, case.tensor("truncated"), coef=settings["stop_properly_penalty_coef"]
        )
    return {"rewards": scores}


@adapts(MAKER + "compute_advantages_and_returns")
def openrlhf_pipeline(case: Case) -> dict[str, Any]:
    settings = case.kwargs
    batches = range(len(case.inputs["experiences"]))
    part = {
        name: [case.tensor(f"experiences.{i}.{name}") for i in batches]
        for name in ("rewards", "kl", "action_mask")
    }
    widest = max(mask.shape[1] for mask in part["action_mask"])
    kl, mask = (torch.cat([_widen(each, widest) for each in part[name]]) for name in ("kl", "action_mask"))
    scores = torch.cat(part["rewards"])
    place = torch.tensor([i for experience in case.inputs["experiences"] for i in experience["index"]])
    groups = place // settings["n_samples_per_prompt"]
    clip_range = tuple(settings["clip_range"]) if "clip_range" in settings else (-10.0, 10.0)
    shaped = _openrlhf_baseline(scores, groups, settings["estimator"])
    rewards = terminal_rewards(
        shaped, kl, mask, coef=settings["kl_coef"], clip_range=clip_range, compat=peer("openrlhf", None)
    )
    batch_normalised = settings["estimator"] in ("gae", "reinforce", "reinforce_baseline")
    how = ("centre" if settings["no_std_norm"] else "population") if batch_normalised else "none"
    common = {"gamma": settings["gamma"], "normalisation": how, **openrlhf_gaps()}
    if settings["estimator"] == "gae":
        values = torch.cat([_widen(case.tensor(f"experiences.{i}.values"), widest) for i in batches])
        result = gae(rewards, mask, values=values, lam=settings["lambd"], **common)
    else:
        result = reinforce(rewards, mask, **common)
    outputs, start = [], 0
    spread = group_statistics(scores, groups).std.masked_fill(group_size(groups) == 1, 0.0)[groups]
    for mask_part in part["action_mask"]:
        rows, width = slice(start, start + len(mask_part)), mask_part.shape[1]
        start += len(mask_part)
        outputs.append(
            {
                "advantages": result.advantages[rows, :width],
                "returns": result.returns[rows, :width],
                "shaped_rewards": scores[rows],
                "info_return": rewards[rows, :width].sum(-1),
                "group_reward_std": spread[rows],
            }
        )
    return {"experiences": outputs}


def _openrlhf_baseline(scores: Tensor, groups: Tensor, estimator: str) -> Tensor:
    if estimator == "rloo":
        size = group_size(groups)[groups]
        return (centred_scores(scores, groups) * size / (size - 1)).float()
    if estimator in ("reinforce_baseline", "dr_grpo"):
        return centred_scores(scores, groups)
    if estimator == "group_norm":
        return standardised_scores(scores, groups, eps=1e-9).float()
    if estimator == "flash_reinforce":
        return centred_scores(scores, torch.zeros_like(groups))
    return scores


def _widen(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
