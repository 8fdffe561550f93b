"""Rules of several policies in one run (rollout.agent.policies)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.derived import async_plan, device_count, engine_name, has_critic, uses_lora
from strop.config.policies import KEY, agent_policies
from strop.config.rules.findings import ConfigFinding, Findings, error

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.inference import GenerationConfig
    from strop.config.schema.ppo import PpoConfig


def several_policies(loaded: Loaded[PpoConfig]) -> Findings:
    """The names fit to the players, something is trained, and the run has what adapters need."""
    config = loaded.config
    agent = config.actor_rollout_ref.rollout.agent
    if not agent.policies:
        return
    try:
        policies = agent_policies(agent)
    except ValueError as problem:
        yield error(KEY, str(problem))
        return
    names = [policy.name for policy in policies]
    if len(names) < 2:
        yield error(KEY, f"{names} is one policy. Name two or more, or leave {KEY} out.")
    if not any(policy.train for policy in policies):
        yield error(KEY, "every policy has train=false, so nothing would be trained.")
    if agent.players and sorted(agent.players) != sorted(names):
        yield error(
            KEY,
            f"every policy is a player: {names}, but players={agent.players}. Leave "
            "actor_rollout_ref.rollout.agent.players out.",
        )
    if agent.command is None:
        yield error(KEY, "needs a program that plays. Set actor_rollout_ref.rollout.agent.command.")
    elif agent.reward != "file":
        yield error(
            KEY,
            f"each policy needs a score, and reward={agent.reward} gives one for the episode. Set "
            "actor_rollout_ref.rollout.agent.reward=file.",
        )
    yield from _not_with_adapters(config)


def _not_with_adapters(config: PpoConfig) -> Findings:
    rollout = config.actor_rollout_ref.rollout
    actor = config.actor_rollout_ref.actor
    if not uses_lora(config):
        yield error(KEY, "policies are LoRA adapters. Set actor_rollout_ref.model.lora_rank, for example 16.")
    name = engine_name(rollout)
    if name != "native" or rollout.nnodes or rollout.tensor_model_parallel_size > 1:
        yield error(
            KEY,
            f"only the native engine of one device samples with several adapters, and the engine is {name} "
            f"with nnodes={rollout.nnodes} and tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size}. Set actor_rollout_ref.rollout.name=native, "
            "actor_rollout_ref.rollout.nnodes=0 and actor_rollout_ref.rollout.tensor_model_parallel_size=1.",
        )
    devices = device_count(config.trainer)
    if devices > 1 or actor.strategy == "megatron":
        yield error(
            KEY,
            f"policies are trained on one device, and there are {devices} with strategy={actor.strategy}. "
            "Set trainer.nnodes=1, trainer.n_gpus_per_node=1 and actor_rollout_ref.actor.strategy=fsdp.",
        )
    plan = async_plan(config)
    if plan.concurrent or plan.interrupts or plan.off_policy:
        yield _refused(
            "trainer.async_training and actor_rollout_ref.rollout.over_sampling", "switch them off"
        )
    if has_critic(config):
        yield _refused(
            "a critic, which would learn the values of all policies at once",
            "choose an estimator without one (grpo, rloo ...)",
        )
    if config.trainer.enable_ema:
        yield _refused("trainer.enable_ema", "set it to false")
    if config.trainer.record_steps:
        yield _refused("trainer.record_steps", "leave it out")
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "adaptive":
        yield _refused("algorithm.kl_ctrl.type=adaptive, one coefficient for all", "set fixed")
    if actor.fsdp_config.optimizer_offload or actor.fsdp_config.offload_policy:
        section = "actor_rollout_ref.actor.fsdp_config"
        yield _refused(f"{section}.optimizer_offload and {section}.offload_policy", "set them to false")


def _refused(what: str, instead: str) -> ConfigFinding:
    return error(KEY, f"cannot be combined with {what}: {instead}, or leave policies out.")


def without_policies(loaded: Loaded[GenerationConfig]) -> Findings:
    """`strop generate` samples from one model."""
    policies = loaded.config.rollout.agent.policies
    if policies:
        yield error(
            "rollout.agent.policies",
            f"{list(policies)}, but generation has one model. Merge a policy (strop merge), and leave "
            "policies out.",
        )
