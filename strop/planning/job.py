"""What a run does in one step, from its configuration: models on ranks, a sampler, passes over the models."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TypeVar

from strop.catalog import PREFERENCE_LOSSES
from strop.config.arithmetic import micro_batch_size, plan_ppo, plan_supervised
from strop.config.derived import (
    async_plan,
    device_count,
    estimator_needs,
    has_critic,
    has_local_teacher,
    has_reference,
    needs_old_log_probs,
    prefill_token_budget,
    resource_pools,
    uses_engine_log_probs,
    uses_lora,
)
from strop.config.megatron import ranks_per_row, row_ranks, supervised_row_ranks
from strop.config.schema.actor import ActorConfig, RefConfig
from strop.config.schema.critic import CriticConfig
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.rollout import RolloutConfig
from strop.config.schema.supervised import DpoConfig, RmConfig, SftConfig, SupervisedDataConfig
from strop.config.schema.trainer import TrainerConfig
from strop.planning.activations import Tokens
from strop.planning.devices import PlannedCluster
from strop.planning.megatron import frozen_role, trained_role
from strop.planning.model_sections import frozen_model
from strop.planning.rollout import PlannedSampler
from strop.planning.supervised_models import supervised_models
from strop.planning.training import TrainedModel

Trainer = TypeVar("Trainer", bound=TrainerConfig)
SupervisedRun = SftConfig | RmConfig | DpoConfig
TrainingConfig = PpoConfig | SftConfig | RmConfig | DpoConfig
"""A configuration that can be planned."""

ACTOR = "actor_rollout_ref.actor"
REFERENCE = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"

SHARED_MODULE_ENGINES = ("native", "hf")
"""Engines that sample from the actor's module. Both are planned in the same way."""
SEQUENCE_PARALLEL_SECTIONS = {"actor": ACTOR, "reference": ACTOR, "critic": "critic"}
"""The section with ulysses_sequence_parallel_size of each role. The reference follows the actor."""
REWARD_ROWS = 8
"""Sequences that a reward model in the run scores at a time."""


@dataclass(frozen=True)
class Pass:
    """One pass of all sequences of a step through one model."""

    phase: str
    role: str
    tokens: Tokens
    """The largest micro-batch on one rank."""
    total: Tokens
    """Of a step, over all ranks."""
    key: str
    """The setting that sizes a micro-batch."""
    size: int
    """Its value."""
    longest: int
    """Tokens of the longest sequence on one rank: no micro-batch is smaller."""
    by_tokens: bool
    """The micro-batch size counts tokens, not sequences."""
    learns: bool = False
    """The pass has a backward pass."""
    accumulated: bool = False
    """Gradients are accumulated over several micro-batches."""
    entropy: bool = False
    times: int = 1
    """Passes over the sequences of a step (ppo_epochs)."""
    updates: int = 1
    """Optimizer steps in one pass."""


@dataclass(frozen=True)
class PlannedJob:
    """Everything that the forecasts of memory and time need to know about a run."""

    cluster: PlannedCluster
    models: dict[str, TrainedModel]
    passes: list[Pass]
    sampler: PlannedSampler | None = None
    engine: str = "native"
    frees_cache: bool = True
    apart: bool = False
    """Engines have devices of their own (rollout.nnodes), of the same kind."""
    side_by_side: bool = False
    """The engine samples while the models learn (async_training)."""
    paths: dict[str, str] = field(default_factory=dict)
    """The configuration section with the fsdp_config of each role."""
    model_paths: dict[str, str] = field(default_factory=dict)
    """The configuration section of the model of each role."""
    slicing: dict[str, str] = field(default_factory=dict)
    """The key of each role's sequence parallel size."""
    tempered: bool = False
    """Logits are divided by a temperature other than 1."""


def job_of(config: TrainingConfig, cluster: PlannedCluster) -> PlannedJob:
    """What a ppo, sft, rm or dpo configuration does on this cluster."""
    if isinstance(config, PpoConfig):
        ppo = dataclasses.replace(config, trainer=_on_cluster(config.trainer, cluster))
        return _reinforcement(ppo, cluster)
    supervised = dataclasses.replace(config, trainer=_on_cluster(config.trainer, cluster))
    return _supervised(supervised, cluster)


def _on_cluster(trainer: Trainer, cluster: PlannedCluster) -> Trainer:
    return dataclasses.replace(trainer, nnodes=cluster.nodes, n_gpus_per_node=cluster.per_node)


# --- passes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MicroBatchKeys:
    """The settings that cut a pass into micro-batches."""

    path: str
    section: ActorConfig | RefConfig | RolloutConfig | CriticConfig | SupervisedDataConfig
    rows_key: str
    tokens_key: str
    by_tokens: bool


@dataclass(frozen=True)
class _PassSizes:
    """How much one pass processes."""

    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of the longest response."""
    step: int
    """Sequences of a step, over all ranks."""
    rank: int
    """Sequences of one rank that are cut into micro-batches."""
    ranks: int
    """Ranks that share the sequences."""
    sequence_parallel: int
    """Ranks that share each sequence."""
    per_item: int = 1
    """Sequences of what the micro-batch size counts: 2 for pairs."""

    @property
    def longest(self) -> int:
        return self.prompt + self.response


def _pass(phase: str, role: str, keys: _MicroBatchKeys, sizes: _PassSizes) -> Pass:
    """A forward pass, cut into micro-batches."""
    longest = sizes.longest
    longest_on_rank = -(-longest // sizes.sequence_parallel)
    if keys.by_tokens:
        key = keys.tokens_key
        size = int(getattr(keys.section, key))
        tokens = min(max(size, longest_on_rank), sizes.rank * longest)
    else:
        key = f"{keys.rows_key}_per_gpu"
        items = sizes.rank // sizes.per_item
        size = micro_batch_size(keys.section, keys.rows_key, items, sizes.ranks)
        tokens = -(-size * sizes.per_item * longest // sizes.sequence_parallel)
    return Pass(
        phase,
        role,
        Tokens(tokens, tokens * sizes.response // longest),
        Tokens(sizes.step * longest, sizes.step * sizes.response),
        key=f"{keys.path}.{key}",
        size=size,
        longest=longest_on_rank,
        by_tokens=keys.by_tokens,
        accumulated=sizes.rank * longest // sizes.sequence_parallel > tokens,
    )


def _passes(config: PpoConfig) -> list[Pass]:
    """The passes of a reinforcement learning step, in order."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    ref = config.actor_rollout_ref.ref
    plan = plan_ppo(config)
    whole = _PassSizes(
        prompt=rollout.prompt_length,
        response=rollout.response_length,
        step=plan.sequences_per_step,
        rank=max(1, math.ceil(plan.sequences_per_step / plan.data_parallel)),
        ranks=plan.data_parallel,
        sequence_parallel=row_ranks(actor),
    )
    rows_key = "log_prob_micro_batch_size"
    tokens_key = "log_prob_max_token_len_per_gpu"
    ref_keys = _MicroBatchKeys(REFERENCE, ref, rows_key, tokens_key, ref.log_prob_use_dynamic_bsz)
    passes = []
    if needs_old_log_probs(config, plan.on_policy) and not uses_engine_log_probs(config):
        keys = _MicroBatchKeys(ROLLOUT, rollout, rows_key, tokens_key, rollout.log_prob_use_dynamic_bsz)
        passes.append(dataclasses.replace(_pass("log_prob", "actor", keys, whole), entropy=True))
    if has_reference(config) and "reference" not in resource_pools(config):
        role = "actor" if uses_lora(config) else "reference"
        passes.append(_pass("ref", role, ref_keys, whole))
    if has_local_teacher(config):
        passes.append(_pass("teacher", "teacher", ref_keys, whole))
    if has_critic(config) and "critic" not in resource_pools(config):
        passes += _critic_passes(config, whole, plan.prompts_per_step)
    keys = _MicroBatchKeys(
        ACTOR, actor, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", actor.use_dynamic_bsz
    )
    sizes = dataclasses.replace(whole, rank=plan.sequences_per_device)
    update = dataclasses.replace(
        _pass("update_actor", "actor", keys, sizes),
        learns=True,
        entropy=bool(actor.entropy_coeff),
        times=actor.ppo_epochs,
        updates=plan.updates_per_epoch,
    )
    return [*passes, update]


def _critic_passes(config: PpoConfig, whole: _PassSizes, prompts: int) -> list[Pass]:
    critic = config.critic
    plan = plan_ppo(config, role="critic")
    sizes = dataclasses.replace(whole, ranks=plan.data_parallel, sequence_parallel=row_ranks(critic))
    keys = _MicroBatchKeys(
        "critic", critic, "forward_micro_batch_size", "forward_max_token_len_per_gpu", critic.use_dynamic_bsz
    )
    values = _pass("values", "critic", keys, sizes)
    keys = _MicroBatchKeys(
        "critic", critic, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", critic.use_dynamic_bsz
    )
    sizes = dataclasses.replace(sizes, rank=plan.sequences_per_device)
    update = dataclasses.replace(
        _pass("update_critic", "critic", keys, sizes),
        learns=True,
        times=critic.ppo_epochs,
        updates=-(-prompts // critic.ppo_mini_batch_size),
    )
    return [values, update]


# --- reinforcement learning ---------------------------------------------------------------------------------


def _reinforcement(config: PpoConfig, cluster: PlannedCluster) -> PlannedJob:
    rollout = config.actor_rollout_ref.rollout
    models = _models(config, cluster)
    engine = rollout.name
    if engine in SHARED_MODULE_ENGINES:
        engine = "native"
    model_paths = {"actor": "actor_rollout_ref.model"}
    if "critic" in models:
        model_paths["critic"] = "critic.model"
    slicing = {}
    for role, path in SEQUENCE_PARALLEL_SECTIONS.items():
        if role in models:
            slicing[role] = f"{path}.ulysses_sequence_parallel_size"
    return PlannedJob(
        cluster,
        models,
        _passes(config),
        _sampler(config, cluster, models["actor"]),
        engine=engine,
        frees_cache=rollout.free_cache_engine,
        side_by_side=async_plan(config).concurrent,
        apart=rollout.nnodes > 0,
        paths={"actor": ACTOR, "reference": REFERENCE, "teacher": REFERENCE, "critic": "critic.model"},
        model_paths=model_paths,
        slicing=slicing,
        tempered=rollout.temperature not in (0.0, 1.0),
    )


def _models(config: PpoConfig, cluster: PlannedCluster) -> dict[str, TrainedModel]:
    """The models on the trainer's ranks, by role."""
    group = config.actor_rollout_ref
    actor = group.actor
    samples_from_actor = (
        group.rollout.name in SHARED_MODULE_ENGINES
        and not async_plan(config).concurrent
        and not group.rollout.nnodes
    )
    models = {
        "actor": trained_role(actor, group.model, actor.fsdp_config, cluster, on_device=samples_from_actor)
    }
    elsewhere = resource_pools(config)
    if has_reference(config) and not uses_lora(config) and "reference" not in elsewhere:
        ref_model = dataclasses.replace(group.model, **group.ref.model)
        fsdp = group.ref.fsdp_config
        models["reference"] = frozen_role(group.ref, ref_model, fsdp, cluster)
    if has_local_teacher(config):
        teacher = dataclasses.replace(group.model, path=config.algorithm.distillation.path, lora_rank=0)
        fsdp = group.ref.fsdp_config
        models["teacher"] = frozen_model(teacher, fsdp, cluster, group.ref.tensor_parallel_size)
    if has_critic(config) and "critic" not in elsewhere:
        critic = config.critic
        models["critic"] = trained_role(critic, critic.model, critic.model.fsdp_config, cluster, scalar=True)
    if _has_local_reward_model(config):
        reward = config.reward_model
        models["reward"] = frozen_model(
            reward.model, reward.model.fsdp_config, cluster, scalar=reward.enable, sharded=False
        )
    return models


def _has_local_reward_model(config: PpoConfig) -> bool:
    """Whether a reward model or a judge runs on the trainer's devices."""
    reward = config.reward_model
    if not reward.model.path or reward.remote_url:
        return False
    if reward.enable and "reward" not in resource_pools(config):
        return True
    return reward.judge.enable and not reward.judge.url


def _sampler(config: PpoConfig, cluster: PlannedCluster, actor: TrainedModel) -> PlannedSampler:
    rollout = config.actor_rollout_ref.rollout
    sequences = plan_ppo(config).sequences_per_step
    if "greedy_baseline" in estimator_needs(config):
        sequences += config.data.train_batch_size
    tensor_parallel = rollout.tensor_model_parallel_size
    devices = rollout.nnodes * rollout.n_gpus_per_node or cluster.ranks
    return PlannedSampler(
        actor.shape,
        max(1, math.ceil(sequences * tensor_parallel / devices)),
        rollout.prompt_length,
        rollout.response_length,
        samples=rollout.n,
        numbers=dataclasses.replace(actor.numbers, master=actor.numbers.compute),
        max_rows=rollout.max_num_seqs,
        batch_tokens=prefill_token_budget(rollout.max_num_batched_tokens, on_cpu=cluster.device.is_cpu),
        share=rollout.gpu_memory_utilization,
        tensor=tensor_parallel,
        shares_module=cluster.ranks == 1 and not async_plan(config).concurrent and not rollout.nnodes,
        records=not rollout.enforce_eager and not cluster.device.is_cpu,
        on_cpu=cluster.device.is_cpu,
        quantized=rollout.quantization is not None,
        four_bit=actor.four_bit,
        fp8_cache=rollout.kv_cache_dtype.startswith("fp8"),
    )


# --- supervised training ------------------------------------------------------------------------------------


def _supervised(config: SupervisedRun, cluster: PlannedCluster) -> PlannedJob:
    data = config.data
    models = supervised_models(config, cluster)
    sequences_per_row = 1 if isinstance(config, SftConfig) else 2  # chosen and rejected
    per_item = sequences_per_row
    if isinstance(config, DpoConfig) and "labels" in PREFERENCE_LOSSES.entry(config.loss.type).facts["needs"]:
        per_item = 1  # single responses; those of other prompts are in a pass of their own
    sizes = _PassSizes(
        prompt=1,
        response=max(1, data.max_length - 1),
        step=sequences_per_row * data.train_batch_size,
        rank=sequences_per_row * plan_supervised(config).rows_per_device,
        ranks=max(1, device_count(config.trainer) // ranks_per_row(config)),
        sequence_parallel=supervised_row_ranks(config),
        per_item=per_item,
    )
    keys = _MicroBatchKeys("data", data, "micro_batch_size", "max_token_len_per_gpu", data.use_dynamic_bsz)
    passes = [dataclasses.replace(_pass("update", "model", keys, sizes), learns=True)]
    if "reference" in models:
        passes.insert(0, _pass("ref", "reference", keys, sizes))
    return PlannedJob(
        cluster,
        models,
        passes,
        paths=dict.fromkeys(models, "model"),
        model_paths={"model": "model"},
        slicing=dict.fromkeys(models, "ulysses_sequence_parallel_size"),
    )
