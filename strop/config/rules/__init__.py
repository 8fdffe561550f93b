"""Rules between keys of a configuration, one file per section. `check` runs those of a root, in order.

Each finding says what clashes, with the values, and what to set. Checks of single values (type, limits,
choices) are in `config.typed`.
"""

from __future__ import annotations

from collections.abc import Callable

from strop.config.compose import Loaded
from strop.config.rules import (
    actor,
    algorithm,
    async_training,
    batch_sizes,
    critic,
    data,
    distillation,
    inference,
    megatron,
    parallelism,
    policies,
    reward,
    rollout,
    router_replay,
    supervised,
    trainer,
)
from strop.config.rules.findings import ConfigFinding, Findings, error, warning

__all__ = ["ConfigFinding", "check", "error", "warning"]

Rule = Callable[[Loaded], Findings]

PPO: tuple[Rule, ...] = (
    actor.model_path,
    data.files,
    reward.score_source,
    reward.manager,
    data.custom_class,
    batch_sizes.divisibility,
    rollout.sampling,
    rollout.context_length,
    rollout.outside_agents,
    policies.several_policies,
    rollout.credit_of_turns,
    rollout.replicas,
    rollout.weight_transport,
    rollout.engine_size,
    rollout.engine_library,
    rollout.environment,
    rollout.speculation,
    rollout.quantization,
    router_replay.router_replay,
    actor.reference_pool,
    critic.resource_pool,
    reward.resource_pool,
    trainer.runtime,
    algorithm.group_size,
    critic.needed,
    algorithm.reward_components,
    algorithm.filter_groups,
    reward.clip_range,
    reward.overlong_buffer,
    algorithm.rollout_correction_inputs,
    algorithm.bypass_mode,
    algorithm.weights_of_vespo,
    algorithm.keyword_arguments,
    distillation.teacher,
    distillation.without_task_reward,
    async_training.run_ahead,
    actor.clip_ratio,
    actor.kl_terms,
    actor.reference_model,
    actor.strategy,
    megatron.megatron,
    trainer.any_training,
    trainer.record_steps,
    trainer.checkpoints,
    actor.betas,
    actor.optimizer,
    actor.lora,
    actor.quantization,
    actor.dropout,
    critic.betas,
    parallelism.tensor_parallel_training,
    parallelism.expert_parallel_training,
    parallelism.sharding,
    parallelism.param_offload,
    parallelism.tensor_parallel_engine,
    parallelism.packed_sequences,
)
SUPERVISED: tuple[Rule, ...] = (
    supervised.inputs,
    supervised.parallel_sizes,
    data.row_token_budget,
    supervised.strategy,
    supervised.frequencies,
    supervised.betas,
    supervised.optimizer,
    supervised.lora,
    supervised.quantization,
    supervised.dropout,
    trainer.any_training,
    supervised.ppo_only_keys,
    data.supervised_validation_files,
)
PREFERENCE: tuple[Rule, ...] = (*SUPERVISED, data.pair_token_budget, supervised.preference_loss)

RULES: dict[str, tuple[Rule, ...]] = {
    "ppo_trainer": PPO,
    "ppo_megatron_trainer": PPO,
    "sft_trainer": SUPERVISED,
    "rm_trainer": PREFERENCE,
    "dpo_trainer": PREFERENCE,
    "generation": (inference.generation, policies.without_policies),
    "evaluation": (inference.evaluation,),
    "reward_server": (inference.reward_server,),
    "training_service": (inference.training_service,),
}


def check(loaded: Loaded) -> list[ConfigFinding]:
    """The findings of every rule that applies to this root, in the order of the rules."""
    findings: list[ConfigFinding] = []
    for rule in RULES[loaded.root]:
        findings.extend(rule(loaded))
    return findings
