"""Rules of batch sizes: what must divide what among prompts, sequences, ranks and micro-batches.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, micro-batches count sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.arithmetic import plan_ppo
from strop.config.derived import (
    device_count,
    has_critic,
    has_local_teacher,
    has_reference,
    needs_old_log_probs,
    resource_pools,
    uses_engine_log_probs,
    uses_lora,
)
from strop.config.megatron import row_ranks
from strop.config.rules.findings import Findings, error, nearest_multiples, warning

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.actor import ActorConfig
    from strop.config.schema.critic import CriticConfig
    from strop.config.schema.ppo import PpoConfig


def divisibility(loaded: Loaded[PpoConfig]) -> Findings:
    """Devices, mini-batches and micro-batches of the actor and of the critic."""
    config = loaded.config
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    devices = device_count(trainer)
    group = actor.ulysses_sequence_parallel_size * actor.tensor_parallel_size
    if devices % group:
        yield error(
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            f"{devices} devices (nnodes {trainer.nnodes} x n_gpus_per_node {trainer.n_gpus_per_node}) cannot "
            f"be divided into groups of {actor.ulysses_sequence_parallel_size} (sequence) x "
            f"{actor.tensor_parallel_size} (tensor). Use {nearest_multiples(devices, group)} devices, or "
            f"divisors of {devices}.",
        )
        return
    yield from _mini_batches(config, "actor_rollout_ref.actor", actor)
    if has_critic(config):
        yield from _mini_batches(config, "critic", config.critic)
    yield from _token_budgets(config)


def _mini_batches(config: PpoConfig, path: str, section: ActorConfig | CriticConfig) -> Findings:
    """Mini-batches of one role divide the batch of a step, and are divisible by its ranks."""
    prompts = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n
    mini = section.ppo_mini_batch_size
    if mini > prompts:
        yield error(
            f"{path}.ppo_mini_batch_size",
            f"{mini} prompts per update, but a step has only data.train_batch_size={prompts}. Set it to "
            f"{prompts} (one update per step) or to a divisor of {prompts}.",
        )
        return
    if prompts % mini:
        yield warning(
            f"{path}.ppo_mini_batch_size",
            f"{mini} does not divide data.train_batch_size={prompts}: the last update of a step has "
            f"{prompts % mini}. data.train_batch_size={nearest_multiples(prompts, mini)} would be even.",
        )
    plan = plan_ppo(config, role="critic" if path == "critic" else "actor")
    ranks = plan.data_parallel
    if (mini * n) % ranks:
        yield error(
            f"{path}.ppo_mini_batch_size",
            f"{mini} prompts x {n} samples = {mini * n} sequences cannot be shared by {ranks} ranks. Set "
            f"it to {_nearest_mini_batches(mini, n, ranks)}.",
        )
    yield from _micro_batches(path, section, ranks, plan.sequences_per_device)


def _nearest_mini_batches(mini: int, n: int, ranks: int) -> str:
    """The mini-batch sizes next to `mini` whose sequences divide evenly over `ranks`."""
    below = None
    above = None
    for size in range(max(1, mini - ranks), mini + ranks + 1):
        if (size * n) % ranks:
            continue
        if size < mini:
            below = size
        elif size > mini and above is None:
            above = size
    return " or ".join(str(size) for size in (below, above) if size is not None)


def _micro_batches(path: str, section: ActorConfig | CriticConfig, ranks: int, sequences: int) -> Findings:
    """The old (all devices) and the new (per device) form of the micro-batch size."""
    over_all = section.ppo_micro_batch_size
    per_device = section.ppo_micro_batch_size_per_gpu
    if over_all is not None and per_device is not None:
        yield error(
            f"{path}.ppo_micro_batch_size",
            f"{over_all} over all devices, set together with {path}.ppo_micro_batch_size_per_gpu="
            f"{per_device}. Keep only the latter.",
        )
    elif over_all is not None and over_all % ranks:
        yield error(
            f"{path}.ppo_micro_batch_size",
            f"{over_all} sequences over all devices cannot be shared by {ranks} ranks. Set "
            f"{nearest_multiples(over_all, ranks)}, or better "
            f"{path}.ppo_micro_batch_size_per_gpu={max(1, over_all // ranks)}.",
        )
    if per_device is None or section.use_dynamic_bsz:
        return
    if per_device < sequences and sequences % per_device:
        yield warning(
            f"{path}.ppo_micro_batch_size_per_gpu",
            f"{per_device} does not divide the {sequences} sequences of an update per device: the last "
            f"micro-batch has {sequences % per_device}. The result is the same; a divisor is a little "
            "faster.",
        )


def _token_budgets(config: PpoConfig) -> Findings:
    """With dynamic batch sizes, a micro-batch must hold the longest sequence."""
    group = config.actor_rollout_ref
    actor, rollout, ref, critic = group.actor, group.rollout, group.ref, config.critic
    log_prob = "log_prob_max_token_len_per_gpu"
    if actor.use_dynamic_bsz:
        yield from _token_budget(config, "actor_rollout_ref.actor", actor, row_ranks(actor))
    recomputes = needs_old_log_probs(config, plan_ppo(config).on_policy)
    if rollout.log_prob_use_dynamic_bsz and recomputes and not uses_engine_log_probs(config):
        yield from _token_budget(config, "actor_rollout_ref.rollout", rollout, row_ranks(actor), log_prob)
    if ref.log_prob_use_dynamic_bsz and (has_reference(config) or has_local_teacher(config)):
        ranks = row_ranks(actor if uses_lora(config) else ref)
        if "reference" in resource_pools(config):  # a whole copy on each device
            ranks = 1
        yield from _token_budget(config, "actor_rollout_ref.ref", ref, ranks, log_prob)
    if has_critic(config) and critic.use_dynamic_bsz:
        for key in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
            yield from _token_budget(config, "critic", critic, row_ranks(critic), key)


def _token_budget(
    config: PpoConfig, path: str, section: object, ranks: int, name: str = "ppo_max_token_len_per_gpu"
) -> Findings:
    """`ranks`: those that share each sequence of this role."""
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    max_model_len = min(max_model_len, config.actor_rollout_ref.rollout.max_model_len or max_model_len)
    tokens = int(getattr(section, name))
    if tokens * ranks < max_model_len:
        yield error(
            f"{path}.{name}",
            f"{tokens} tokens (x {ranks} by sequence parallelism) cannot hold one sequence of "
            f"max_prompt_length + max_response_length = {max_model_len}. Set at least "
            f"{-(-max_model_len // ranks)}.",
        )
