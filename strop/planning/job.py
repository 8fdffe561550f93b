"""From a configuration to what the planner computes with: models on ranks, a sampler, and passes over the models."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.config.arithmetic import micro_batch, plan_ppo, plan_supervised
from strop.config.asynchrony import ahead_of, old_from_engine
from strop.config.engine import prefill_tokens
from strop.config.objective import has_critic, has_reference, needs, needs_old_log_probs, uses_lora
from strop.planning.activations import Numbers, Tokens
from strop.planning.devices import Device
from strop.planning.known import shape_of
from strop.planning.rollout import Sampler
from strop.planning.shape import Shape
from strop.planning.training import Placement, TrainedModel

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
BORROWERS = ("native", "hf")
"""Engines that sample from the actor's module; they are planned alike."""
SLICERS = {"actor": "actor_rollout_ref.actor", "reference": "actor_rollout_ref.actor", "critic": "critic"}
"""Which section says how many devices share the sequences of a role; the reference follows the actor."""
REWARD_ROWS = 8
"""Sequences that a reward model in the run scores at a time."""


@dataclass(frozen=True)
class Cluster:
    device: Device
    nodes: int = 1
    per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Pass:
    """A way of all sequences of a step through one model."""

    phase: str
    role: str
    tokens: Tokens
    """A micro-batch on one rank, at its largest."""
    total: Tokens
    """Of a step, over all ranks."""
    key: str
    """The setting that sizes a micro-batch."""
    size: int
    """Its value."""
    longest: int
    """Tokens of one sequence on one rank: no micro-batch is smaller."""
    by_tokens: bool
    learns: bool = False
    accumulated: bool = False
    entropy: bool = False
    times: int = 1
    """Passes over the sequences of a step (ppo_epochs)."""
    updates: int = 1
    """Steps of the optimizer in one of them."""


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    models: dict[str, TrainedModel]
    passes: list[Pass]
    sampler: Sampler | None = None
    engine: str = "native"
    frees_cache: bool = True
    side_by_side: bool = False
    """The engine samples while the models learn (async_training)."""
    paths: dict[str, str] = field(default_factory=dict)
    """Where the configuration of each role's sharding stands."""
    model_paths: dict[str, str] = field(default_factory=dict)
    """Where the configuration of each role's model stands."""
    slicing: dict[str, str] = field(default_factory=dict)
    """The key by which devices share the sequences of each role."""
    tempered: bool = False


def job_of(config: Any, cluster: Cluster) -> Job:
    """What a ppo, sft, rm or dpo configuration does on this cluster."""
    config = with_cluster(config, cluster)
    return _supervised(config, cluster) if hasattr(config, "optim") else _reinforcement(config, cluster)


def with_cluster(config: Any, cluster: Cluster) -> Any:
    trainer = dataclasses.replace(config.trainer, nnodes=cluster.nodes, n_gpus_per_node=cluster.per_node)
    return dataclasses.replace(config, trainer=trainer)


# --- models ----------------------------------------------------------------------------------------------------------------


def _numbers(model: Any, fsdp: Any, device: Device, *, frozen: bool = False) -> Numbers:
    compute = 4 if device.is_cpu else BYTES[fsdp.dtype]
    master = compute if frozen else BYTES[fsdp.model_dtype]
    return Numbers(compute, master, residual=4 if model.fp32_residual else compute)


def _placement(fsdp: Any, cluster: Cluster, tensor: int = 1, *, lent: bool = False) -> Placement:
    """`lent`: an engine samples from the module itself, which therefore stays on the device."""
    ranks = cluster.ranks
    size = fsdp.fsdp_size
    if size not in (-1, ranks) and (size < 1 or ranks % size):
        raise ValueError(f"fsdp_config.fsdp_size={size} does not divide the {ranks} ranks. Set -1, or a divisor of {ranks}.")
    return Placement(
        ranks=ranks,
        shards=ranks if size == -1 else size,
        tensor=tensor,
        in_host=ranks > 1 and (fsdp.offload_policy or fsdp.param_offload or fsdp.optimizer_offload),
        parks_module=(fsdp.param_offload or fsdp.offload_policy) and not lent,
        parks_optimizer=fsdp.optimizer_offload or fsdp.offload_policy,
        keeps_gathered=not fsdp.reshard_after_forward,
        reduce=BYTES[(fsdp.mixed_precision or {}).get("reduce_dtype", "fp32")],
    )


def _moments(optim: Any) -> int:
    return 2 if "adam" in optim.optimizer.lower() else 1


def _shape(model: Any, *, scalar: bool = False) -> Shape:
    changes = {key: value for key, value in model.override_config.items() if key != "attn_implementation"}
    return shape_of(model.path, config_path=model.hf_config_path, changes=changes, scalar=scalar)


def _lora_rank(model: Any) -> int:
    """The rank of new adapters, or of those that training starts from."""
    if not model.lora_adapter_path:
        return int(model.lora_rank)
    file = Path(model.lora_adapter_path).expanduser() / "adapter_config.json"
    if not file.is_file():
        raise ValueError(
            f"lora_adapter_path={model.lora_adapter_path!r} holds no adapter_config.json, so its rank is not known."
        )
    return int(json.loads(file.read_text(encoding="utf-8"))["r"])


def _trained(
    model: Any, fsdp: Any, optim: Any, cluster: Cluster, tensor: int = 1, *, scalar: bool = False, lent: bool = False
) -> TrainedModel:
    return TrainedModel(
        _shape(model, scalar=scalar),
        _numbers(model, fsdp, cluster.device),
        _placement(fsdp, cluster, tensor, lent=lent),
        checkpointed=model.enable_gradient_checkpointing,
        lora_rank=_lora_rank(model),
        moments=_moments(optim),
    )


def _frozen(
    model: Any, fsdp: Any, cluster: Cluster, tensor: int = 1, *, scalar: bool = False, divided: bool = True
) -> TrainedModel:
    place = _placement(fsdp, cluster, tensor) if divided else Placement()
    return TrainedModel(_shape(model, scalar=scalar), _numbers(model, fsdp, cluster.device, frozen=True), place, frozen=True)


# --- passes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """How a pass is cut into micro-batches: the keys, and what they say."""

    path: str
    section: Any
    name: str
    tokens_key: str
    dynamic: bool


def _pass(
    phase: str, role: str, cut: _Cut, prompt: int, response: int, sequences: int, step: int, sharing: int, **facts: Any
) -> Pass:
    """`sequences` of one rank are cut; a step has `step`; `sharing` ranks have a slice of each sequence."""
    longest = prompt + response
    if cut.dynamic:
        budget = int(getattr(cut.section, cut.tokens_key))
        tokens = min(max(budget, -(-longest // sharing)), sequences * longest)
        key, size = cut.tokens_key, budget
    else:
        size = micro_batch(cut.section, cut.name, sequences, 1)
        tokens = -(-size * longest // sharing)
        key = f"{cut.name}_per_gpu"
    answered = tokens * response // longest
    return Pass(
        phase,
        role,
        Tokens(tokens, answered),
        Tokens(step * longest, step * response),
        key=f"{cut.path}.{key}",
        size=size,
        longest=-(-longest // sharing),
        by_tokens=cut.dynamic,
        accumulated=sequences * longest // sharing > tokens,
        **facts,
    )


def _reinforcement(config: Any, cluster: Cluster) -> Job:
    group, critic = config.actor_rollout_ref, config.critic
    actor, rollout, ref, model = group.actor, group.rollout, group.ref, group.model
    tensor, sharing = actor.tensor_parallel_size, actor.ulysses_sequence_parallel_size
    plan = plan_ppo(config)
    prompt, response, step = rollout.prompt_length, rollout.response_length, plan.sequences_per_step
    ahead = ahead_of(config).beside
    lent = rollout.name in BORROWERS and not ahead
    models = {"actor": _trained(model, actor.fsdp_config, actor.optim, cluster, tensor, lent=lent)}
    on_rank = max(1, math.ceil(step / plan.data_parallel))
    sizes: dict[str, Any] = {"prompt": prompt, "response": response, "step": step, "sharing": sharing}
    cut = _Cut("actor_rollout_ref.actor", actor, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", actor.use_dynamic_bsz)
    learning = {
        "learns": True,
        "entropy": bool(actor.entropy_coeff or actor.calculate_entropy),
        "times": actor.ppo_epochs,
        "updates": plan.updates_per_epoch,
    }
    update = _pass("update_actor", "actor", cut, sequences=plan.sequences_per_device, **sizes, **learning)
    passes = []
    cut = _Cut(
        "actor_rollout_ref.rollout",
        rollout,
        "log_prob_micro_batch_size",
        "log_prob_max_token_len_per_gpu",
        rollout.log_prob_use_dynamic_bsz,
    )
    if needs_old_log_probs(config, plan.on_policy) and not old_from_engine(config):
        passes.append(_pass("log_prob", "actor", cut, sequences=on_rank, **sizes, entropy=True))
    if has_reference(config):
        cut = dataclasses.replace(cut, path="actor_rollout_ref.ref", section=ref, dynamic=ref.log_prob_use_dynamic_bsz)
        if not uses_lora(config):
            other = dataclasses.replace(model, **ref.model)
            models["reference"] = _frozen(other, ref.fsdp_config, cluster, ref.tensor_parallel_size)
        who = "actor" if uses_lora(config) else "reference"
        passes.append(_pass("ref", who, cut, sequences=on_rank, **sizes))
    if has_critic(config):
        size = critic.tensor_parallel_size
        models["critic"] = _trained(critic.model, critic.model.fsdp_config, critic.optim, cluster, size, scalar=True)
        own = sizes | {"sharing": critic.ulysses_sequence_parallel_size}
        cut = _Cut("critic", critic, "forward_micro_batch_size", "forward_max_token_len_per_gpu", critic.use_dynamic_bsz)
        passes.append(_pass("values", "critic", cut, sequences=on_rank, **own))
        cut = _Cut("critic", critic, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", critic.use_dynamic_bsz)
        learning = {
            "learns": True,
            "times": critic.ppo_epochs,
            "updates": -(-plan.prompts_per_step // critic.ppo_mini_batch_size),
        }
        per_device = plan_ppo(config, role="critic").sequences_per_device
        passes.append(_pass("update_critic", "critic", cut, sequences=per_device, **own, **learning))
    reward = config.reward_model
    if reward.model.path and not reward.remote_url and (reward.enable or (reward.judge.enable and not reward.judge.url)):
        models["reward"] = _frozen(reward.model, reward.model.fsdp_config, cluster, scalar=reward.enable, divided=False)
    return Job(
        cluster,
        models,
        [*passes, update],
        _sampler(config, cluster, models["actor"], step),
        engine="native" if rollout.name in BORROWERS else rollout.name,
        frees_cache=rollout.free_cache_engine,
        side_by_side=ahead,
        paths={"actor": "actor_rollout_ref.actor", "reference": "actor_rollout_ref.ref", "critic": "critic.model"},
        model_paths={"actor": "actor_rollout_ref.model"} | ({"critic": "critic.model"} if "critic" in models else {}),
        slicing={role: f"{path}.ulysses_sequence_parallel_size" for role, path in SLICERS.items() if role in models},
        tempered=rollout.temperature not in (0.0, 1.0),
    )


def _sampler(config: Any, cluster: Cluster, actor: TrainedModel, sequences: int) -> Sampler:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    numbers = dataclasses.replace(actor.numbers, master=actor.numbers.compute)
    baselines = config.data.train_batch_size if "greedy_baseline" in needs(config) else 0
    beside = ahead_of(config).beside
    return Sampler(
        actor.shape,
        max(1, math.ceil((sequences + baselines) * size / cluster.ranks)),
        rollout.prompt_length,
        rollout.response_length,
        samples=rollout.n,
        numbers=numbers,
        max_rows=rollout.max_num_seqs,
        batch_tokens=prefill_tokens(rollout.max_num_batched_tokens, on_cpu=cluster.device.is_cpu),
        share=rollout.gpu_memory_utilization,
        tensor=size,
        borrows=cluster.ranks == 1 and not beside,
        records=not rollout.enforce_eager and not cluster.device.is_cpu,
        on_cpu=cluster.device.is_cpu,
    )


def _supervised(config: Any, cluster: Cluster) -> Job:
    data, model = config.data, config.model
    plan = plan_supervised(config)
    pairs = hasattr(data, "chosen_key")
    scalar = pairs and hasattr(config.loss, "margin")
    rows = 2 if pairs else 1
    models = {"model": _trained(model, model.fsdp_config, config.optim, cluster, scalar=scalar)}
    cut = _Cut("data", data, "micro_batch_size", "max_token_len_per_gpu", data.use_dynamic_bsz)
    sizes: dict[str, Any] = {"prompt": 1, "response": max(1, data.max_length - 1), "step": rows * data.train_batch_size}
    sizes |= {"sharing": config.ulysses_sequence_parallel_size, "sequences": rows * plan.rows_per_device}
    passes = [_pass("update", "model", cut, **sizes, learns=True)]
    if _has_own_reference(config):
        other = dataclasses.replace(model, path=config.ref.path)
        models["reference"] = _frozen(other, model.fsdp_config, cluster)
        passes.insert(0, _pass("ref", "reference", cut, **sizes))
    slicing = dict.fromkeys(models, "ulysses_sequence_parallel_size")
    paths = dict.fromkeys(models, "model")
    return Job(cluster, models, passes, paths=paths, model_paths={"model": "model"}, slicing=slicing)


def _has_own_reference(config: Any) -> bool:
    """Whether DPO has a second model on the device while it trains."""
    if not hasattr(config, "ref") or config.loss.reference_free or config.loss.type == "simpo" or config.ref.param_offload:
        return False
    same = config.ref.path == config.model.path
    return not (same and (config.model.lora_rank or config.loss.precompute_ref))
