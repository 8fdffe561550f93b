"""How the passes of a reinforcement-learning step are split into micro-batches."""

from __future__ import annotations

from strop.backends.base import MicroBatching
from strop.config.arithmetic import Plan, micro_batch_size, plan_ppo
from strop.config.derived import device_count, resource_pools
from strop.config.schema.actor import ActorConfig, RefConfig
from strop.config.schema.critic import CriticConfig
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.rollout import RolloutConfig


def micro_batches(config: PpoConfig, plan: Plan) -> dict[str, MicroBatching]:
    """How each pass over a model is cut into micro-batches. It never changes a result."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    ref = config.actor_rollout_ref.ref
    critic = config.critic
    critic_plan = plan_ppo(config, role="critic")
    ref_ranks = plan.data_parallel
    pools = resource_pools(config)
    if "reference" in pools:
        ref_ranks = device_count(pools["reference"])
    step_rows = plan.sequences_per_step

    def cut(
        section: ActorConfig | RolloutConfig | RefConfig | CriticConfig,
        key: str,
        rows: int,
        ranks: int,
        dynamic: bool,
        tokens: int,
    ) -> MicroBatching:
        max_tokens = tokens if dynamic else None
        return MicroBatching(rows=micro_batch_size(section, key, rows, ranks), max_tokens=max_tokens)

    return {
        "actor": cut(
            actor,
            "ppo_micro_batch_size",
            plan.sequences_per_device,
            plan.data_parallel,
            actor.use_dynamic_bsz,
            actor.ppo_max_token_len_per_gpu,
        ),
        "log_prob": cut(
            rollout,
            "log_prob_micro_batch_size",
            step_rows,
            plan.data_parallel,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
        ),
        "ref": cut(
            ref,
            "log_prob_micro_batch_size",
            step_rows,
            ref_ranks,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
        ),
        "critic": cut(
            critic,
            "ppo_micro_batch_size",
            critic_plan.sequences_per_device,
            critic_plan.data_parallel,
            critic.use_dynamic_bsz,
            critic.ppo_max_token_len_per_gpu,
        ),
        "values": cut(
            critic,
            "forward_micro_batch_size",
            step_rows,
            critic_plan.data_parallel,
            critic.use_dynamic_bsz,
            critic.forward_max_token_len_per_gpu,
        ),
    }
