"""verl's and OpenRLHF's policy losses: settings renamed, the mode applied afterwards."""

from __future__ import annotations

from typing import Any

import torch

from strop.algorithms.aggregation import Totals, masked_fill_zero, token_mean
from strop.algorithms.kl import kl_penalty
from strop.algorithms.policy_losses.clipped import LOG_RATIO_LIMIT, PolicyLoss, policy_loss
from strop.algorithms.rollout_correction import correct_rollout, importance_weights
from strop.catalog import POLICY_LOSSES
from tests.algorithms.reference.token_selection import divergence_gate
from tests.golden.adapters.aggregation import gradient, verl_aggregate
from tests.golden.harness import Case, adapts, peer

CORE = "verl.trainer.ppo.core_algos"


def averaged(
    metrics: dict[str, torch.Tensor], mask: torch.Tensor, prefix: str = "actor/"
) -> dict[str, torch.Tensor]:
    totals = Totals.of(mask)
    return {
        prefix + name: token_mean(masked_fill_zero(value, mask), mask, totals)
        for name, value in metrics.items()
    }


def verl_settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """ActorConfig's fields: the sides of the clip range fall back to clip_ratio only when they are null."""
    both = kwargs.get("clip_ratio", 0.2)
    low, high = kwargs.get("clip_ratio_low", 0.2), kwargs.get("clip_ratio_high", 0.2)
    settings = {
        "clip_low": both if low is None else low,
        "clip_high": both if high is None else high,
        "clip_c": kwargs.get("clip_ratio_c", 3.0),
    }
    smooth = {key: kwargs[key] for key in ("tau_pos", "tau_neg") if key in kwargs}
    return settings | smooth | (kwargs.get("policy_loss") or {})


def verl_loss(
    name: str, case: Case, old: str = "old_log_prob"
) -> tuple[PolicyLoss, torch.Tensor, torch.Tensor, str]:
    log_prob, mask = case.tensor("log_prob", grad=True), case.tensor("response_mask")
    if "torch_seed" in case.kwargs:
        torch.manual_seed(case.kwargs["torch_seed"])
    weights = case.tensor("rollout_is_weights") if "rollout_is_weights" in case.inputs else None
    result = policy_loss(
        name,
        log_probs=log_prob,
        old_log_probs=case.tensor(old),
        advantages=case.tensor("advantages"),
        mask=mask,
        rollout_weights=weights,
        **verl_settings(case.kwargs),
    )
    mode = POLICY_LOSSES.entry(name).facts["aggregation"] or case.kwargs.get("loss_agg_mode", "token-mean")
    return result, log_prob, mask, mode


NAMES = ["vanilla", "gspo", "sapo", "cispo", "gpg", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro"]


@adapts(*(f"{CORE}.compute_policy_loss_{name}" for name in NAMES))
def compute_policy_loss_by_name(case: Case) -> dict[str, Any]:
    result, log_prob, mask, mode = verl_loss(case.function.partition("compute_policy_loss_")[2], case)
    loss = verl_aggregate(result.per_token, mask, mode, case.kwargs.get("global_batch_info") or {})
    return {
        "loss": loss,
        "metrics": averaged(result.metrics, mask),
        "grad_log_prob": gradient(loss, log_prob)[0],
    }


@adapts(f"{CORE}.compute_policy_loss_geo_mean")
def compute_policy_loss_geo_mean(case: Case) -> dict[str, Any]:
    """verl averages over all rows, those without tokens included, and looks at no global count."""
    result, log_prob, mask, mode = verl_loss("geo_mean", case)
    loss = verl_aggregate(result.per_token, mask, mode, {"global_batch_size": peer(len(mask), None)})
    return {
        "loss": loss,
        "metrics": averaged(result.metrics, mask),
        "grad_log_prob": gradient(loss, log_prob)[0],
    }


@adapts(f"{CORE}.compute_policy_loss_reinforce")
def compute_policy_loss_reinforce(case: Case) -> dict[str, Any]:
    result, log_prob, mask, mode = verl_loss("reinforce", case, old="rollout_log_prob")
    loss = verl_aggregate(result.per_token, mask, mode, {})
    return {
        "loss": loss,
        "metrics": averaged(result.metrics, mask),
        "grad_log_prob": gradient(loss, log_prob)[0],
    }


@adapts(f"{CORE}.compute_policy_loss")
def compute_policy_loss(case: Case) -> dict[str, Any]:
    log_prob, mask = case.tensor("log_prob", grad=True), case.tensor("response_mask")
    both = case.kwargs["cliprange"]
    result = policy_loss(
        "vanilla",
        log_probs=log_prob,
        old_log_probs=case.tensor("old_log_prob"),
        advantages=case.tensor("advantages"),
        mask=mask,
        clip_low=case.kwargs.get("cliprange_low", both),
        clip_high=case.kwargs.get("cliprange_high", both),
        clip_c=case.kwargs.get("clip_ratio_c", 3.0),
    )
    loss = verl_aggregate(result.per_token, mask, case.kwargs.get("loss_agg_mode", "token-mean"), {})
    return {
        "loss": loss,
        "grad_log_prob": gradient(loss, log_prob)[0],
        **averaged(result.metrics, mask, prefix=""),
    }


@adapts(f"{CORE}.compute_policy_loss_bypass_mode")
def compute_policy_loss_bypass_mode(case: Case) -> dict[str, Any]:
    """verl takes rejected tokens out of the denominators too, which it counts in each micro-batch."""
    settings = case.kwargs["policy_loss"]["rollout_correction"]
    if settings is None:
        raise ValueError("bypass_mode needs rollout_correction settings")
    log_prob, rollout = case.tensor("log_prob", grad=True), case.tensor("old_log_prob")
    mask = case.tensor("response_mask")
    result = policy_loss(
        "bypass_mode",
        log_probs=log_prob,
        old_log_probs=rollout,
        advantages=case.tensor("advantages"),
        mask=mask,
        **verl_settings(case.kwargs),
        **settings,
    )
    kept = result.metrics.pop("kept").to(mask.dtype)
    kept = mask * peer(kept, torch.ones_like(kept))
    loss = verl_aggregate(result.per_token, kept, case.kwargs["loss_agg_mode"], {})
    correction = {key: value for key, value in settings.items() if key != "loss_type"}
    diagnostics = correct_rollout(log_prob.detach(), rollout, mask, **correction).metrics
    metrics = averaged(result.metrics, kept) | diagnostics
    return {"loss": loss, "metrics": metrics, "grad_log_prob": gradient(loss, log_prob)[0]}


@adapts("verl.workers.utils.losses.ppo_loss")
def ppo_loss(case: Case) -> dict[str, Any]:
    """The whole actor objective: policy loss + kl_loss_coef KL - entropy_coeff entropy, each under the same mode."""
    result, log_prob, mask, mode = verl_loss(
        (case.kwargs.get("policy_loss") or {}).get("loss_mode", "vanilla"), case, old="old_log_probs"
    )
    info = case.kwargs["totals"] | {"loss_scale_factor": case.kwargs.get("loss_scale_factor")}
    leaves = {"grad_log_prob": log_prob}
    policy = loss = verl_aggregate(result.per_token, mask, mode, info)
    metrics: dict[str, Any] = averaged(result.metrics, mask) | {"actor/pg_loss": policy}
    if "entropy" in case.inputs:
        leaves["grad_entropy"] = case.tensor("entropy", grad=True)
        entropy = verl_aggregate(leaves["grad_entropy"], mask, mode, info)
        loss = loss - case.kwargs["entropy_coeff"] * entropy
        metrics["actor/entropy_loss"] = entropy
    if case.kwargs.get("use_kl_loss"):
        estimated = kl_penalty(log_prob, case.tensor("ref_log_prob"), estimator=case.kwargs["kl_loss_type"])
        divergence = verl_aggregate(estimated, mask, mode, info)
        loss = loss + case.kwargs["kl_loss_coef"] * divergence
        metrics |= {"kl_loss": divergence, "kl_coef": case.kwargs["kl_loss_coef"]}
    return {"loss": loss, "metrics": metrics, **dict(zip(leaves, gradient(loss, *leaves.values())))}


@adapts("openrlhf.models.loss.PolicyLoss")
def openrlhf_policy_loss(case: Case) -> dict[str, Any]:
    """Its correction multiplies by constants, zero for what is filtered, and keeps the denominators."""
    kwargs = case.kwargs
    kind, level = kwargs.get("policy_loss_type", "ppo"), kwargs.get("is_correction_level")
    if kind not in ("ppo", "gspo") or (level == "seq" and kwargs.get("is_correction_mode") == "clip"):
        raise ValueError(f"not a setting of PolicyLoss: {kwargs}")
    log_probs, mask = case.tensor("log_probs", grad=True), case.tensor("action_mask")
    old = case.tensor("old_log_probs")
    shared: dict[str, Any] = {
        "clip_low": kwargs.get("clip_eps_low", 0.2),
        "clip_high": kwargs.get("clip_eps_high", 0.2),
    }
    tensors = {"log_probs": log_probs, "advantages": case.tensor("advantages"), "mask": mask}
    output: dict[str, Any] = {"vllm_kl": None, "is_filter_ratio": None}
    if kind == "gspo":
        anchor = case.tensor("rollout_log_probs") if level else old
        result = policy_loss(
            "gspo", old_log_probs=anchor, level="sequence", max_log_ratio=LOG_RATIO_LIMIT, **tensors, **shared
        )
        mode = "seq-mean-token-mean"
    else:
        weights = None
        if level:
            rollout = case.tensor("rollout_log_probs")
            weights, output["is_filter_ratio"] = openrlhf_weights(old, rollout, mask, kwargs)
            output["vllm_kl"] = averaged({"kl": rollout - old}, mask, "")["kl"]
        result = policy_loss(
            "vanilla",
            old_log_probs=old,
            clip_c=kwargs.get("dual_clip"),
            rollout_weights=weights,
            **tensors,
            **shared,
        )
        mode = "token-mean" if kwargs.get("token_level_loss", True) else "seq-mean-token-mean"
    loss = verl_aggregate(result.per_token, mask, mode, kwargs)
    output |= {"clip_ratio": averaged(result.metrics, mask, "")["pg_clipfrac"]}
    output |= {"ppo_kl": averaged({"kl": old - log_probs}, mask, "")["kl"]}
    return {"loss": loss, "grad_log_probs": gradient(loss, log_probs)[0], **output}


def openrlhf_weights(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights exp(old - rollout) and the share of tokens or sequences that the gate turns away."""
    lower, upper = kwargs["is_correction_threshold"]
    level = "sequence" if kwargs["is_correction_level"] == "seq" else "token"
    gate = divergence_gate(
        old,
        rollout,
        mask,
        kind=kwargs.get("is_correction_gating", "ratio"),
        level=level,
        lower=lower,
        upper=upper,
    )
    if kwargs.get("is_correction_mode", "mask") == "clip":
        weights, _ = importance_weights(old - rollout, mask, lower=lower, upper=upper)
    else:
        weights = importance_weights(old - rollout, mask, upper=torch.inf)[0] * gate
    away = (mask.bool() & ~gate).float()
    ratio = averaged({"away": away}, mask, "")["away"] if level == "token" else away.amax(-1).mean()
    return weights, ratio
