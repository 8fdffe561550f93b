"""Which models a configuration brings into being, why, and what they maximise, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import ADVANTAGES, POLICY_LOSSES
from strop.config.asynchrony import correction_of, old_from_engine


@dataclass(frozen=True)
class Role:
    name: str
    exists: bool
    why: str


def needs(config: Any) -> tuple[str, ...]:
    """What the advantage estimator must be given beside rewards and mask."""
    return tuple(ADVANTAGES.entry(config.algorithm.adv_estimator).facts["needs"])


def needs_old_log_probs(config: Any, on_policy: bool) -> bool:
    """Whether log-probs must be known before the update. On-policy the update's own are the old ones: one forward less."""
    correction = correction_of(config)
    return (
        not on_policy
        or config.algorithm.use_kl_in_reward
        or old_from_engine(config)
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or bool({"old_log_probs", "sum_pi_squared"} & set(needs(config)))
    )


def has_critic(config: Any) -> bool:
    return "values" in needs(config) if config.critic.enable is None else config.critic.enable


def has_reference(config: Any) -> bool:
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def uses_lora(config: Any) -> bool:
    model = config.actor_rollout_ref.model
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def roles(config: Any) -> list[Role]:
    """Actor, critic, reference, reward model, baseline rollout: is each there, and why."""
    estimator = config.algorithm.adv_estimator
    if config.critic.enable is not None:
        critic_why = f"critic.enable={str(config.critic.enable).lower()}"
    else:
        critic_why = f"{estimator} {'needs' if has_critic(config) else 'does without'} values"
    kl = [
        name
        for name, on in (
            ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
            ("actor.use_kl_loss", config.actor_rollout_ref.actor.use_kl_loss),
        )
        if on
    ]
    reference_why = " and ".join(kl) + " compares with it" if kl else "no KL term is on"
    if kl and uses_lora(config):
        reference_why += "; it is the actor with its adapters switched off"
    reward = config.reward_model
    if reward.enable:
        reward_why = f"reward_model.enable, from {reward.remote_url or reward.model.path}"
    elif reward.judge.enable:
        reward_why = f"reward_model.judge, from {reward.judge.url or reward.model.path}"
    else:
        reward_why = "scores come from " + (config.custom_reward_function.path or "the scorer of each data_source")
    found = [
        Role("actor", True, f"trained from {config.actor_rollout_ref.model.path}"),
        Role("critic", has_critic(config), critic_why),
        Role("reference", has_reference(config), reference_why),
        Role("reward model", reward.enable or reward.judge.enable, reward_why),
    ]
    if "greedy_baseline" in needs(config):
        found.append(Role("greedy baseline", True, f"{estimator} compares with one greedy rollout per prompt"))
    return found


def clip_range(actor: Any) -> tuple[float, float]:
    """The two sides of the clip: clip_ratio unless a side is given."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def objective(config: Any) -> str:
    """The effective objective in one line."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    low, high = clip_range(actor)
    loss = POLICY_LOSSES.entry(actor.policy_loss.loss_mode)
    mode = loss.facts["aggregation"] or actor.loss_agg_mode
    reward = "score"
    if algorithm.use_kl_in_reward:
        kind = "adaptive" if algorithm.kl_ctrl.type == "adaptive" else "fixed"
        reward += f" - {algorithm.kl_ctrl.kl_coef:g}*KL[{algorithm.kl_penalty}, {kind}]"
    text = f"maximise {mode} of the {loss.name} surrogate (clip {1 - low:g}..{1 + high:g})"
    text += f", advantage {algorithm.adv_estimator}({reward})"
    if actor.use_kl_loss:
        text += f" - {actor.kl_loss_coef:g}*KL[{actor.kl_loss_type}] to the reference"
    if actor.entropy_coeff:
        text += f" {'+' if actor.entropy_coeff > 0 else '-'} {abs(actor.entropy_coeff):g}*entropy"
    if algorithm.pretrain_files:
        text += f" - {algorithm.ptx_coef:g}*language-model loss on pretrain_files"
    return text
