"""TRL's GRPO and RLOO losses: one of our policy losses, then one of our aggregations, for every `loss_type`."""

from __future__ import annotations

from typing import Any

import torch

from strop.algorithms.aggregation import Totals, aggregate, masked_fill_zero, masked_var
from strop.algorithms.kl import kl_penalty
from strop.algorithms.policy_losses.clipped import PolicyLoss, policy_loss
from strop.algorithms.policy_losses.smooth import gamma_weights
from tests.algorithms.reference.token_selection import high_entropy_mask, off_policy_mask
from tests.golden.adapters.aggregation import gradient
from tests.golden.adapters.policy_losses import averaged
from tests.golden.harness import Case, adapts, peer

GRPO = "trl.trainer.grpo_trainer.GRPOTrainer"
MODES = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
}


def optional(case: Case, name: str) -> torch.Tensor | None:
    return case.tensor(name) if name in case.inputs else None


def trl_policy_loss(
    case: Case, log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> PolicyLoss:
    """TRL caps CISPO's ratio at epsilon_high itself, without a floor."""
    kwargs, kind = case.kwargs, case.kwargs["loss_type"]
    low, high = kwargs.get("epsilon_low", 0.2), kwargs.get("epsilon_high", 0.2)
    old = optional(case, "old_per_token_logps")
    settings: dict[str, Any] = {
        "level": kwargs.get("importance_sampling_level", "token"),
        "clip_low": low,
        "clip_high": high,
    }
    if kind == "cispo":
        settings |= {"clip_low": 1.0, "clip_high": high - 1}
    settings |= {"clip_c": None, "ratio_cap": kwargs.get("delta")}
    settings |= {
        "tau_pos": kwargs.get("sapo_temperature_pos", 1.0),
        "tau_neg": kwargs.get("sapo_temperature_neg", 1.05),
    }
    settings |= {
        key.removeprefix("vespo_"): value for key, value in kwargs.items() if key.startswith("vespo_")
    }
    return policy_loss(
        kind if kind in ("cispo", "sapo", "vespo") else "vanilla",
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if old is None else old,
        advantages=advantages,
        mask=mask,
        rollout_weights=trl_weights(case, mask) if kwargs.get("use_vllm") else None,
        **settings,
    )


def trl_weights(case: Case, mask: torch.Tensor) -> torch.Tensor:
    """TRL's VESPO multiplies the weights of a whole row, padding and tool output included; here they join the first token's."""
    weights = case.tensor("importance_sampling_ratio")
    if case.kwargs["loss_type"] == "vespo" and peer(True, False):
        strangers = weights.log().masked_fill(mask.bool(), 0.0).sum(-1).exp()
        first = mask.argmax(-1, keepdim=True)
        weights = weights.scatter(-1, first, weights.gather(-1, first) * strangers[:, None])
    return weights


def trl_totals(case: Case, mask: torch.Tensor) -> Totals:
    """Empty rows count; the token modes of the DAPO family divide by the items of the whole step."""
    kwargs = case.kwargs
    tokens = max(int(mask.sum()), 1)
    rows = peer(len(mask), Totals.of(mask).sequences)
    if kwargs["loss_type"] in ("dapo", "cispo", "vespo"):
        steps = kwargs.get("gradient_accumulation_steps", 1) if kwargs.get("training", True) else 1
        return Totals(
            case.inputs["num_items_in_batch"] * steps / kwargs.get("steps_per_generation", 1), rows, 1
        )
    width = kwargs.get("max_completion_length", 16)
    return Totals(tokens, rows, width)


@adapts(f"{GRPO}._compute_loss")
def compute_loss(case: Case) -> dict[str, Any]:
    kwargs, kind = case.kwargs, case.kwargs["loss_type"]
    log_probs, entropies = case.tensor("per_token_logps", grad=True), case.tensor("entropies", grad=True)
    mask = case.tensor("completion_mask") * (case.tensor("tool_mask") if "tool_mask" in case.inputs else 1)
    rows = case.tensor("advantages")[:, None]
    advantages = rows.expand_as(log_probs)
    result = trl_policy_loss(case, log_probs, advantages, mask)
    per_token, metrics = result.per_token, averaged({"entropy": entropies.detach()}, mask, "")
    if "top_entropy_quantile" in kwargs:
        per_token = per_token * high_entropy_mask(
            entropies.detach(), mask, quantile=1 - kwargs["top_entropy_quantile"]
        )
    if "off_policy_mask_threshold" in kwargs:
        sampled, limit = case.tensor("sampling_per_token_logps"), kwargs["off_policy_mask_threshold"]
        per_token = per_token * off_policy_mask(log_probs, sampled, rows, mask, threshold=limit)
    if kwargs.get("beta"):
        kl = kl_penalty(log_probs, case.tensor("ref_per_token_logps"), estimator="k3")
        per_token = per_token + kwargs["beta"] * kl
        metrics |= averaged({"kl": kl.detach()}, mask, "")
    totals, mode = trl_totals(case, mask), MODES[kind]
    steps = kwargs.get("gradient_accumulation_steps", 1) if kwargs.get("training", True) else 1
    steps = 1 if kind in ("dapo", "cispo", "vespo") else steps
    loss = aggregate(per_token, mask, mode, totals) / steps
    if "entropy_coef" in kwargs:
        metrics |= {"policy_loss": loss.detach(), "entropy_coef": kwargs["entropy_coef"]}
        loss = loss - kwargs["entropy_coef"] * aggregate(entropies, mask, mode, totals) / steps
    if kwargs.get("importance_sampling_level") == "sequence":  # one ratio per row, and rows are counted
        result = PolicyLoss(result.per_token, {name: value[:, :1] for name, value in result.metrics.items()})
        advantages, mask = rows, torch.ones_like(rows)
    metrics |= clip_metrics(kind, result, advantages, mask)
    grads = dict(zip(("grad_per_token_logps", "grad_entropies"), gradient(loss, log_probs, entropies)))
    return {"loss": loss, "metrics": metrics, **grads}


def clip_metrics(
    kind: str, result: PolicyLoss, advantages: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    if kind == "sapo":
        return {}
    if kind == "vespo":
        return {"vespo/phi_seq_mean": result.metrics["phi"][:, 0].mean()}
    clipped = result.metrics["pg_clipfrac"]
    low, high = clipped * (advantages < 0), clipped * (advantages > 0)
    if kind == "cispo":
        return averaged({"cispo_clip_ratio": high}, mask, "")
    means = averaged({"low_mean": low, "high_mean": high, "region_mean": clipped}, mask, "clip_ratio/")
    per_row = [masked_fill_zero(side, mask).sum(-1) / mask.sum(-1).clamp(min=1) for side in (low, high)]
    return means | {"clip_ratio/low_min": per_row[0].min(), "clip_ratio/high_max": per_row[1].max()}


@adapts("trl.trainer.rloo_trainer.RLOOTrainer._compute_loss")
def rloo_compute_loss(case: Case) -> dict[str, Any]:
    """One ratio for the whole answer, the product over its tokens: the answer is a single action."""
    log_probs, mask = case.tensor("per_token_logps", grad=True), case.tensor("completion_mask")
    answers = masked_fill_zero(log_probs, mask).sum(-1, keepdim=True)
    rows = case.tensor("advantages")[:, None]
    one = torch.ones_like(rows)
    result = policy_loss(
        "vanilla",
        log_probs=answers,
        old_log_probs=case.tensor("old_logps")[:, None],
        advantages=rows,
        mask=one,
        clip_low=case.kwargs["epsilon_low"],
        clip_high=case.kwargs["epsilon_high"],
        clip_c=None,
    )
    loss = aggregate(result.per_token, one, "token-mean", Totals.of(one))
    metrics = clip_metrics("rloo", result, rows, one)
    return {"loss": loss, "metrics": metrics, "grad_per_token_logps": gradient(loss, log_probs)[0]}


@adapts(f"{GRPO}.get_gamma_weights")
def get_gamma_weights(case: Case) -> dict[str, Any]:
    weights = optional(case, "importance_sampling_ratio")
    ratios, rows, mask = (case.tensor(name) for name in ("log_ratio_per_token", "advantages", "mask"))
    return {"phi": gamma_weights(ratios, rows, mask, rollout_weights=weights, **case.kwargs)}


@adapts(f"{GRPO}.get_high_entropy_mask")
def get_high_entropy_mask(case: Case) -> dict[str, Any]:
    return {
        "mask": high_entropy_mask(
            case.tensor("entropies"), case.tensor("mask"), quantile=case.kwargs["threshold"]
        )
    }


@adapts(f"{GRPO}.get_off_policy_mask")
def get_off_policy_mask(case: Case) -> dict[str, Any]:
    names = ("per_token_logps", "sampling_per_token_logps", "advantages", "mask")
    kept = off_policy_mask(
        *(case.tensor(name) for name in names), threshold=case.kwargs["off_policy_threshold"]
    )
    return {"mask": kept.long()}


@adapts("trl.trainer.utils.nanstd")
def nanstd(case: Case) -> dict[str, Any]:
    values = case.tensor("tensor")
    if case.kwargs["dim"] is None:
        return {"std": masked_var(values, ~values.isnan()).sqrt()}
    return {"std": torch.stack([masked_var(row, ~row.isnan()).sqrt() for row in values])}
