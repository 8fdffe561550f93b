"""KL estimators, KL in the reward, and the controllers of its coefficient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strop.algorithms.kl import UNLIMITED, FixedKL, KLController, kl_controller, kl_penalty
from strop.algorithms.reward_shaping import kl_in_reward
from tests.algorithms.reference.terminal_rewards import terminal_rewards
from tests.golden.harness import Case, adapts, peer


def controller(settings: dict[str, Any]) -> KLController:
    extra = {
        ours: settings[theirs]
        for ours, theirs in (("target", "target_kl"), ("horizon", "horizon"))
        if theirs in settings
    }
    return kl_controller(settings["type"], coef=settings["kl_coef"], **extra)


def trace(control: KLController, kls: list[float], samples: list[int]) -> dict[str, list[float]]:
    values = [control.value]
    for kl, n in zip(kls, samples, strict=True):
        control.update(kl, n)
        values.append(control.value)
    return {"values": values}


@adapts("verl.trainer.ppo.core_algos.kl_penalty")
def penalty(case: Case) -> dict[str, Tensor]:
    log_probs = case.tensor("logprob", grad=True)
    kl = kl_penalty(log_probs, case.tensor("ref_logprob"), estimator=case.kwargs["kl_penalty"])
    (kl * case.tensor("grad_weight")).sum().backward()
    return {"kl": kl, "grad_logprob": log_probs.grad}


@adapts("verl.trainer.ppo.core_algos.compute_rewards")
def plain_rewards(case: Case) -> dict[str, Tensor]:
    scores, log_probs = case.tensor("token_level_scores"), case.tensor("old_log_prob")
    ref = case.tensor("ref_log_prob")
    return {
        "token_level_rewards": kl_in_reward(
            scores, log_probs, ref, scores.new_ones(scores.shape), coef=case.kwargs["kl_ratio"]
        ).rewards
    }


@adapts("verl.trainer.ppo.ray_trainer.apply_kl_penalty")
def shaped_rewards(case: Case) -> dict[str, Any]:
    control = controller(case.kwargs["kl_ctrl"])
    before = control.value
    shaped = kl_in_reward(
        case.tensor("token_level_scores"),
        case.tensor("old_log_probs"),
        case.tensor("ref_log_prob"),
        case.tensor("response_mask"),
        coef=before,
        estimator=case.kwargs["kl_penalty"],
    )
    control.update(shaped.kl, len(shaped.rewards))
    return {
        "token_level_rewards": shaped.rewards,
        "metrics": {"actor/reward_kl_penalty": shaped.kl, "actor/reward_kl_penalty_coeff": before},
        "kl_coef_after": control.value,
    }


@adapts("verl.trainer.ppo.core_algos.get_kl_controller")
def verl_controller(case: Case) -> dict[str, list[float]]:
    return trace(controller(case.kwargs["kl_ctrl"]), case.inputs["current_kl"], case.inputs["n_steps"])


@adapts("openrlhf.trainer.ppo_utils.kl_controller.AdaptiveKLController")
def openrlhf_adaptive(case: Case) -> dict[str, list[float]]:
    settings = case.kwargs
    control = kl_controller(
        "adaptive", coef=settings["init_kl_coef"], target=settings["target"], horizon=settings["horizon"]
    )
    return trace(control, case.inputs["current"], case.inputs["n_steps"])


@adapts("openrlhf.trainer.ppo_utils.kl_controller.FixedKLController")
def openrlhf_fixed(case: Case) -> dict[str, list[float]]:
    return trace(FixedKL(case.kwargs["kl_coef"]), case.inputs["current"], case.inputs["n_steps"])


@adapts("openrlhf.models.utils.compute_approx_kl")
def approximate(case: Case) -> dict[str, Tensor]:
    log_probs = case.tensor("log_probs", grad=True)
    name = case.kwargs["kl_estimator"]
    limits = {"limit": 10.0, "exponent_limit": UNLIMITED} if name == "k3" else {"limit": 10.0}
    kl = kl_penalty(
        log_probs,
        case.tensor("log_probs_base"),
        estimator=name + "+" * case.kwargs.get("unbiased_gradient", False),
        old_log_probs=case.tensor("log_probs_old") if "log_probs_old" in case.inputs else None,
        **peer(limits, {}),
    )
    (kl * case.tensor("grad_weight")).sum().backward()
    return {"kl": kl, "grad_log_probs": log_probs.grad}


@adapts("openrlhf.models.utils.compute_reward")
def openrlhf_reward(case: Case) -> dict[str, Tensor]:
    limits = case.kwargs.get("reward_clip_range")
    rewards = terminal_rewards(
        case.tensor("r"),
        case.tensor("kl"),
        case.tensor("action_mask"),
        coef=case.kwargs["kl_coef"],
        clip_range=tuple(limits) if limits else None,
        compat=peer("openrlhf", None),
    )
    return {"reward": rewards}
