"""Losses other than the policy losses: next-token cross entropy (SFT and PPO-ptx), the value loss of a
critic, and losses on pairs of a chosen and a rejected response (reward models, DPO, IPO, SimPO, ORPO) or on
labelled responses (KTO)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.algorithms.aggregation import Totals, aggregate, masked_fill_zero, require_same_shape

CERTAIN = 1e-6
"""Smallest -log-prob of an answer whose odds are computed."""


def sft_loss(log_probs: Tensor, mask: Tensor, totals: Totals, *, mode: str = "token-mean") -> Tensor:
    """Cross entropy from the log-probs of the target tokens [B, T]: -Σ log π / tokens of the whole optimizer
    step.

    The mask is aligned with the targets: it is set where the *predicted* token is trained, the
    end-of-sequence included.
    """
    return aggregate(-log_probs, mask, mode, totals)


def ptx_loss(log_probs: Tensor, mask: Tensor, totals: Totals, *, coef: float) -> Tensor:
    """Pre-training loss mixed into RL (InstructGPT's PPO-ptx): coef times the cross entropy of pre-training
    text."""
    if coef < 0:
        raise ValueError(f"ptx coef must not be negative, got {coef}.")
    return coef * sft_loss(log_probs, mask, totals)


class ValueLoss(NamedTuple):
    """The result of the value loss."""

    per_token: Tensor  # [B, T], zero outside the mask
    metrics: dict[str, Tensor]  # [B, T] each, to be averaged over the mask


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float | None = 0.5
) -> ValueLoss:
    """½ max((V - G)², (V_c - G)²) with V_c = clip(V, V_old - c, V_old + c); without a clip range ½ (V - G)².

    With a range of 0, V_c is V_old. `values` [B, T] are the predictions that are trained, `old_values` those
    of the rollout, `returns` the targets G.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip_range is not None and not clip_range >= 0:
        raise ValueError(f"clip_range must be 0 or more, got {clip_range}. Use None for no clipping.")
    values, old_values, returns = (masked_fill_zero(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    if clip_range is None:
        return ValueLoss(0.5 * error, {"vf_clipfrac": torch.zeros_like(error)})
    near = values.clamp(old_values - clip_range, old_values + clip_range)
    clipped_error = (near - returns).square()
    larger = (clipped_error > error).detach().to(error.dtype)
    return ValueLoss(0.5 * torch.maximum(error, clipped_error), {"vf_clipfrac": larger})


# --- preference losses --------------------------------------------------------------------------------------
#
# Every function returns one loss per pair [P], not averaged: divide the sum by the pairs of the whole
# optimizer step.


class PreferenceLoss(NamedTuple):
    """The result of a preference loss."""

    per_pair: Tensor  # [P]
    metrics: dict[str, Tensor]  # [P] each, without gradient, to be averaged over pairs


def answer_log_probs(log_probs: Tensor, mask: Tensor, *, average: bool = False) -> Tensor:
    """Log-prob of each answer [B]: the sum over its tokens [B, T], or their mean (length-normalised)."""
    require_same_shape(log_probs=log_probs, mask=mask)
    total = masked_fill_zero(log_probs, mask).sum(-1)
    if average:
        return total / mask.sum(-1).clamp(min=1)
    return total


def reward_sigmoid(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float | None = None
) -> PreferenceLoss:
    """Bradley-Terry on the scores of a reward model: l = -log σ(r_c - r_r - margin)."""
    require_same_shape(chosen=chosen, rejected=rejected)
    if isinstance(margin, Tensor):
        require_same_shape(chosen=chosen, margin=margin)
    if margin is None:
        margin = 0.0
    gap = chosen - rejected - margin
    return _result(-F.logsigmoid(gap), chosen, rejected)


def reward_logexp(chosen: Tensor, rejected: Tensor) -> PreferenceLoss:
    """l = log(1 + exp(r_r - r_c)), which is `reward_sigmoid` without a margin, written so that it cannot
    overflow."""
    require_same_shape(chosen=chosen, rejected=rejected)
    return _result(F.softplus(rejected - chosen), chosen, rejected)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    chosen_nll: Tensor | None = None,
    nll_coef: float = 0.0,
) -> PreferenceLoss:
    """DPO (Rafailov et al. 2023) on log-probs of whole answers [P], from `answer_log_probs`:

        h = β ((ℓ_c - ℓ_ref_c) - (ℓ_r - ℓ_ref_r)) - margin
        l = -(1 - s) log σ(h) - s log σ(-h) + nll_coef · nll_c

    `label_smoothing` s > 0 is cDPO (Mitchell 2023), for labels that are wrong with probability s. Without
    reference log-probs the loss is reference-free. `chosen_nll` [P] is the negative mean log-prob of the
    chosen answer.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is the share of wrong labels, 0 <= s < 0.5; got {label_smoothing}."
        )
    reward_c, reward_r = _implicit_rewards(chosen, rejected, reference_chosen, reference_rejected, beta)
    gap = reward_c - reward_r - margin
    loss = -(1 - label_smoothing) * F.logsigmoid(gap) - label_smoothing * F.logsigmoid(-gap)
    return _result(_with_nll(loss, chosen_nll, nll_coef), reward_c, reward_r)


def ipo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    chosen_nll: Tensor | None = None,
    nll_coef: float = 0.0,
) -> PreferenceLoss:
    """IPO (Azar et al. 2023): l = (h - 1 / (2 β))² with h = (ℓ_c - ℓ_ref_c) - (ℓ_r - ℓ_ref_r).

    With summed log-probs the target gap is one for the answer; with averaged ones it is per token.
    """
    reward_c, reward_r = _implicit_rewards(chosen, rejected, reference_chosen, reference_rejected, beta)
    loss = ((reward_c - reward_r) / beta - 1 / (2 * beta)).square()
    return _result(_with_nll(loss, chosen_nll, nll_coef), reward_c, reward_r)


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> PreferenceLoss:
    """SimPO (Meng et al. 2024): reference-free DPO on length-normalised log-probs, with a target margin."""
    return dpo(chosen, rejected, beta=beta, margin=margin)


def orpo(chosen: Tensor, rejected: Tensor, chosen_nll: Tensor, *, beta: float = 0.1) -> PreferenceLoss:
    """ORPO (Hong et al. 2024) on length-normalised log-probs [P], without a reference:

        l = nll_c - β log σ(log odds_c - log odds_r),  odds = p / (1 - p) with p = exp(ℓ)

    `chosen_nll` [P] is the negative mean log-prob of the chosen answer; β is λ of the paper.
    """
    require_same_shape(chosen=chosen, rejected=rejected, chosen_nll=chosen_nll)
    gap = _log_odds(chosen) - _log_odds(rejected)
    found = _result(chosen_nll - beta * F.logsigmoid(gap), beta * chosen, beta * rejected)
    found.metrics["log_odds"] = gap.detach()
    return found


def _log_odds(log_probs: Tensor) -> Tensor:
    """ℓ - log(1 - exp(ℓ)). A probability of 1 is taken as a little less, so that the odds are finite."""
    log_probs = log_probs.clamp(max=-CERTAIN)
    near_zero = log_probs > -math.log(2)
    small = torch.where(near_zero, log_probs, -1.0)  # each branch computes a gradient, which must be finite
    large = torch.where(near_zero, -1.0, log_probs)
    return log_probs - torch.where(near_zero, (-small.expm1()).log(), (-large.exp()).log1p())


def kto(
    answers: Tensor,
    reference: Tensor,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """KTO (Ethayarajh et al. 2024) on the log-probs of whole answers [N], which need no partner:

        r = ℓ - ℓ_ref
        l = w_d (1 - σ(β (r - z)))  for a good answer, w_u (1 - σ(β (z - r)))  for a bad one

    `labels` [N] are 1 for good answers and 0 for bad ones. z, `kl` [N], is an estimate of the KL divergence
    to the reference, from answers to other prompts (`kto_kl`); it has no gradient.
    """
    require_same_shape(answers=answers, reference=reference, labels=labels, kl=kl)
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}.")
    good = labels.bool()
    reward = beta * (answers - reference - kl)
    signed = torch.where(good, reward, -reward)
    weight = torch.where(good, desirable_weight, undesirable_weight)
    metrics = {
        "accuracy": (signed > 0).to(torch.float32),
        "signed_reward": signed.detach(),
        "kl": kl.detach(),
    }
    return PreferenceLoss(weight * (1 - signed.sigmoid()), metrics)


def kto_kl(mismatched: Tensor, reference: Tensor) -> Tensor:
    """max(0, mean(ℓ - ℓ_ref)) over answers behind prompts that they do not belong to."""
    require_same_shape(mismatched=mismatched, reference=reference)
    return (mismatched - reference).mean().clamp(min=0).detach()


def _implicit_rewards(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None,
    reference_rejected: Tensor | None,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """β (ℓ - ℓ_ref) of both answers."""
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}.")
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError(
            "Give reference_chosen and reference_rejected together, or neither for a reference-free loss."
        )
    require_same_shape(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    if reference_chosen is None or reference_rejected is None:
        return beta * chosen, beta * rejected
    return beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)


def _with_nll(loss: Tensor, chosen_nll: Tensor | None, coefficient: float) -> Tensor:
    if not coefficient:
        return loss
    if chosen_nll is None:
        raise ValueError(
            f"nll_coef is {coefficient} but chosen_nll was not given; pass the chosen answers' mean NLL [P]."
        )
    require_same_shape(loss=loss, chosen_nll=chosen_nll)
    return loss + coefficient * chosen_nll


def _result(per_pair: Tensor, chosen: Tensor, rejected: Tensor) -> PreferenceLoss:
    chosen = chosen.detach()
    rejected = rejected.detach()
    metrics = {
        "accuracy": (chosen > rejected).to(torch.float32),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
    }
    return PreferenceLoss(per_pair, metrics)
