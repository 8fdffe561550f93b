"""Pairwise and supervised losses of OpenRLHF and verl."""

from __future__ import annotations

from typing import Any

import torch

from strop.algorithms.aggregation import Totals
from strop.algorithms.logprobs_of_logits import token_logprobs
from strop.algorithms.losses import answer_log_probs, dpo, ipo, reward_logexp, reward_sigmoid, sft_loss
from tests.golden.adapters.aggregation import gradient, openrlhf_aggregate
from tests.golden.harness import Case, NotApplicable, adapts

LOSS = "openrlhf.models.loss"


@adapts(f"{LOSS}.PairWiseLoss", f"{LOSS}.LogExpLoss")
def pairwise(case: Case) -> dict[str, Any]:
    if "overflow" in case.tags:
        raise NotApplicable(
            "the peer's log(1 + exp(gap)) overflows to inf and NaN gradients; ours is written stably"
        )
    chosen, rejected = case.tensor("chosen_reward", grad=True), case.tensor("reject_reward", grad=True)
    if case.function.endswith("LogExpLoss"):
        loss = reward_logexp(chosen, rejected).per_pair.mean()
    else:
        margin = case.tensor("margin") if "margin" in case.inputs else None
        loss = reward_sigmoid(chosen, rejected, margin=margin).per_pair.mean()
    return {"loss": loss, **dict(zip(("grad_chosen", "grad_reject"), gradient(loss, chosen, rejected)))}


@adapts(f"{LOSS}.DPOLoss")
def dpo_loss(case: Case) -> dict[str, Any]:
    chosen, rejected = (
        case.tensor("policy_chosen_logps", grad=True),
        case.tensor("policy_rejected_logps", grad=True),
    )
    references = case.tensor("reference_chosen_logps"), case.tensor("reference_rejected_logps")
    if case.kwargs.get("ipo"):
        result = ipo(chosen, rejected, *references, beta=case.kwargs["beta"])
    else:
        smoothing = case.kwargs.get("label_smoothing", 0.0)
        result = dpo(chosen, rejected, *references, beta=case.kwargs["beta"], label_smoothing=smoothing)
    loss = result.per_pair.mean()
    grads = dict(zip(("grad_policy_chosen", "grad_policy_rejected"), gradient(loss, chosen, rejected)))
    rewards = {
        "chosen_rewards": result.metrics["chosen_reward"],
        "rejected_rewards": result.metrics["rejected_reward"],
    }
    return {"loss": loss, **rewards, **grads}


@adapts(f"{LOSS}.SFTLoss")
def openrlhf_sft_loss(case: Case) -> dict[str, Any]:
    log_probs, mask = case.tensor("per_token_logps", grad=True), case.tensor("loss_mask")
    loss = openrlhf_aggregate(-log_probs, mask, case.kwargs)
    return {"loss": loss, "grad_per_token_logps": gradient(loss, log_probs)[0]}


@adapts(f"{LOSS}.GPTLMLoss")
def gpt_lm_loss(case: Case) -> dict[str, Any]:
    logits, targets = case.tensor("logits", grad=True), case.tensor("labels")[:, 1:]
    mask = targets != -100
    loss = sft_loss(token_logprobs(logits[:, :-1], targets), mask, Totals.of(mask))
    return {"loss": loss, "grad_logits": gradient(loss, logits)[0]}


@adapts("verl.workers.utils.losses.sft_loss")
def verl_sft_loss(case: Case) -> dict[str, Any]:
    """Packed, the mask belongs to input tokens and is moved onto their predictions by a roll over the whole buffer."""
    log_probs = case.tensor("log_probs", grad=True)
    if "response_mask" in case.inputs:
        mask = case.tensor("response_mask")
    else:
        mask = torch.roll(case.tensor("loss_mask"), -1)
    rows, on = log_probs.reshape(len(mask), -1), mask.reshape(len(mask), -1)
    totals = Totals(case.kwargs["batch_num_tokens"], 1, 1)
    loss = sft_loss(rows, on, totals) * case.kwargs["dp_size"]
    return {"loss": loss, "grad_log_probs": gradient(loss, log_probs)[0]}


@adapts("openrlhf.trainer.dpo_trainer.DPOTrainer._get_batch_logps")
def get_batch_logps(case: Case) -> dict[str, Any]:
    """The mask of a sequence without its prompt, moved onto the predictions."""
    log_probs, mask = case.tensor("per_token_logps"), case.tensor("attention_mask").clone()
    for row, prompt in zip(mask, case.inputs["prompt_id_lens"]):
        row[:prompt] = 0
    targets = mask[:, 1:]
    return {
        "logps_sum": answer_log_probs(log_probs, targets),
        "logps_mean": answer_log_probs(log_probs, targets, average=True),
    }
