"""The effective objective of a PPO run in one line. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import POLICY_LOSSES
from strop.config.derived import clip_range, has_task_reward

if TYPE_CHECKING:
    from strop.config.schema.ppo import PpoConfig


def objective(config: PpoConfig) -> str:
    """The effective objective in one line."""
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    loss = POLICY_LOSSES.entry("bypass_mode" if correction.bypass_mode else actor.policy_loss.loss_mode)
    aggregation = loss.facts["aggregation"] or actor.loss_agg_mode
    reward = "score"
    if algorithm.use_kl_in_reward:
        reward += f" - {algorithm.kl_ctrl.kl_coef:g}*KL[{algorithm.kl_penalty}, {algorithm.kl_ctrl.type}]"
    text = f"maximise {aggregation} of the {loss.name} surrogate"
    if loss.facts["clips"] and not (correction.bypass_mode and correction.loss_type == "reinforce"):
        low, high = clip_range(actor)
        text += f" (clip {1 - low:g}..{1 + high:g})"
    text += f", advantage {_advantage(config, reward)}"
    if actor.use_kl_loss:
        text += f" - {actor.kl_loss_coef:g}*KL[{actor.kl_loss_type}] to the reference"
    if actor.entropy_coeff:
        sign = "+" if actor.entropy_coeff > 0 else "-"
        text += f" {sign} {abs(actor.entropy_coeff):g}*entropy"
    if (teacher := algorithm.distillation).is_loss:
        text += f" - {teacher.coef:g}*{teacher.loss_mode} to the teacher"
    if algorithm.pretrain_files:
        text += f" - {algorithm.ptx_coef:g}*language-model loss on pretrain_files"
    return text


def _advantage(config: PpoConfig, reward: str) -> str:
    """The advantage as a formula."""
    teacher = config.algorithm.distillation
    gain = f"{teacher.coef:g}*(log teacher - log policy)"
    if not has_task_reward(config):
        return gain if teacher.is_reward else "0"
    task = f"{config.algorithm.adv_estimator}({reward})"
    return f"{task} + {gain}" if teacher.is_reward else task
