"""Log-probs, entropies and value losses of the three peers."""

from __future__ import annotations

from typing import Any

import torch

from strop.algorithms.logprobs_of_logits import sum_pi_squared, token_entropy, token_logprobs
from strop.algorithms.losses import value_loss
from tests.algorithms.reference.distillation import forward_kl_topk
from tests.golden.adapters.aggregation import gradient, openrlhf_aggregate, verl_aggregate
from tests.golden.adapters.policy_losses import averaged
from tests.golden.harness import Case, adapts, peer

TORCH = "verl.utils.torch_functional"


def unless_rounding(ours: torch.Tensor, theirs: Any, scale: float) -> torch.Tensor:
    """Their digits where both agree up to the float32 rounding of logits of that scale, else ours.

    The peers subtract two numbers as large as the logits, so a small entropy carries the rounding error of the large ones; ours
    does not, and is closer to the float64 result.
    """
    expected = torch.tensor(theirs).reshape(ours.shape)
    near = (ours - expected).abs() <= 2 * torch.finfo(torch.float32).eps * scale
    return torch.where(near & peer(True, False), expected, ours.detach())


@adapts(
    f"{TORCH}.entropy_from_logits",
    f"{TORCH}.entropy_from_logits_with_chunking",
    "trl.trainer.utils.entropy_from_logits",
)
def entropy_from_logits(case: Case) -> dict[str, Any]:
    logits = case.tensor("logits", grad=True)
    entropy = token_entropy(logits, chunk=case.kwargs.get("chunk_size", 3))
    weight = case.tensor("grad_weight") if "grad_weight" in case.inputs else torch.ones_like(entropy)
    output = {"entropy": entropy, "grad_logits": gradient((entropy * weight).sum(), logits)[0]}
    scale = logits.abs().max().item()
    return {
        name: unless_rounding(value, case.outputs.get(name, value.tolist()), scale)
        for name, value in output.items()
    }


@adapts("openrlhf.models.utils.compute_entropy")
def compute_entropy(case: Case) -> dict[str, Any]:
    logits = case.tensor("logits")
    return {
        "entropy": unless_rounding(token_entropy(logits), case.outputs["entropy"], logits.abs().max().item())
    }


@adapts("verl.trainer.ppo.core_algos.compute_entropy_loss")
def compute_entropy_loss(case: Case) -> dict[str, Any]:
    entropy = token_entropy(case.tensor("logits"))
    return {
        "entropy_loss": verl_aggregate(
            entropy, case.tensor("response_mask"), case.kwargs["loss_agg_mode"], {}
        )
    }


@adapts(f"{TORCH}.logprobs_from_logits", "openrlhf.models.utils.log_probs_from_logits")
def logprobs_from_logits(case: Case) -> dict[str, Any]:
    found = token_logprobs(
        case.tensor("logits"), case.tensor("labels"), temperature=case.kwargs.get("temperature", 1.0), chunk=2
    )
    return {"log_probs": found}


@adapts("trl.trainer.utils.selective_log_softmax")
def selective_log_softmax(case: Case) -> dict[str, Any]:
    return {"log_probs": token_logprobs(case.tensor("logits"), case.tensor("index"))}


@adapts(f"{TORCH}.calculate_sum_pi_squared_from_logits")
def calculate_sum_pi_squared_from_logits(case: Case) -> dict[str, Any]:
    return {"sum_pi_squared": sum_pi_squared(case.tensor("logits"), chunk=3)}


@adapts(f"{TORCH}.log_probs_from_logits_response")
def log_probs_from_logits_response(case: Case) -> dict[str, Any]:
    """The logits at a position predict the token after it."""
    length = case.kwargs["response_length"]
    logits, ids = case.tensor("logits")[:, -length - 1 : -1], case.tensor("input_ids")[:, -length:]
    return {"log_probs": token_logprobs(logits, ids)}


@adapts("verl.trainer.ppo.core_algos.compute_value_loss")
def compute_value_loss(case: Case) -> dict[str, Any]:
    vpreds, mask = case.tensor("vpreds", grad=True), case.tensor("response_mask")
    clip_range = case.kwargs["cliprange_value"]
    result = value_loss(vpreds, case.tensor("values"), case.tensor("returns"), mask, clip_range=clip_range)
    loss = verl_aggregate(result.per_token, mask, case.kwargs.get("loss_agg_mode", "token-mean"), case.kwargs)
    return {"vf_loss": loss, "grad_vpreds": gradient(loss, vpreds)[0], **averaged(result.metrics, mask, "")}


@adapts("openrlhf.models.loss.ValueLoss")
def openrlhf_value_loss(case: Case) -> dict[str, Any]:
    values, mask = case.tensor("values", grad=True), case.tensor("action_mask")
    result = value_loss(
        values,
        case.tensor("old_values"),
        case.tensor("returns"),
        mask,
        clip_range=case.kwargs.get("clip_eps"),
    )
    loss = openrlhf_aggregate(result.per_token, mask, case.kwargs)
    return {"loss": loss, "grad_values": gradient(loss, values)[0]}


@adapts("verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk")
def compute_forward_kl_topk(case: Case) -> dict[str, Any]:
    logits = case.tensor("student_logits", grad=True)
    found = forward_kl_topk(
        logits,
        case.tensor("teacher_topk_log_probs")[None],
        case.tensor("teacher_topk_ids")[None],
        log_prob_floor=case.kwargs["log_prob_min_clamp"],
    )
    weight = case.tensor("grad_weight") if "grad_weight" in case.inputs else torch.ones_like(found.per_token)
    output = found._asdict()
    loss = output.pop("per_token")
    return {
        "distillation_losses": loss,
        "grad_student_logits": gradient((loss * weight).sum(), logits)[0],
        **output,
    }
