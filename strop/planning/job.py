"""From a configuration to what the planner computes with: models on ranks, a sampler, and passes over the models."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from strop.config.arithmetic import micro_batch, plan_ppo, plan_supervised
from strop.config.asynchrony import ahead_of, old_from_engine
from strop.config.engine import prefill_tokens
from strop.config.objective import has_critic, has_reference, needs, needs_old_log_probs, uses_lora
from strop.config.pools import pools
from strop.planning.activations import Tokens
from strop.planning.devices import Cluster
from strop.planning.roles import frozen, trained
from strop.planning.rollout import Sampler
from strop.planning.training import TrainedModel

BORROWERS = ("native", "hf")
"""Engines that sample from the actor's module; they are planned alike."""
SLICERS = {"actor": "actor_rollout_ref.actor", "reference": "actor_rollout_ref.actor", "critic": "critic"}
"""Which section says how many devices share the sequences of a role; the reference follows the actor."""
REWARD_ROWS = 8
"""Sequences that a reward model in the run scores at a time."""


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
    apart: bool = False
    """Engines have devices of their own (rollout.nnodes), of the same kind."""
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
    group, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    actor, rollout, ref = group.actor, group.rollout, group.ref
    ahead = ahead_of(config).beside
    lent = rollout.name in BORROWERS and not ahead and not rollout.nnodes
    models = {"actor": trained(group.model, actor.fsdp_config, actor.optim, cluster, actor.tensor_parallel_size, lent=lent)}
    if has_reference(config) and not uses_lora(config) and "reference" not in pools(config):
        other = dataclasses.replace(group.model, **ref.model)
        models["reference"] = frozen(other, ref.fsdp_config, cluster, ref.tensor_parallel_size)
    if has_critic(config) and "critic" not in pools(config):
        size = critic.tensor_parallel_size
        models["critic"] = trained(critic.model, critic.model.fsdp_config, critic.optim, cluster, size, scalar=True)
    here = (reward.enable and "reward" not in pools(config)) or (reward.judge.enable and not reward.judge.url)
    if reward.model.path and not reward.remote_url and here:
        models["reward"] = frozen(reward.model, reward.model.fsdp_config, cluster, scalar=reward.enable, divided=False)
    return Job(
        cluster,
        models,
        _passes(config),
        _sampler(config, cluster, models["actor"]),
        engine="native" if rollout.name in BORROWERS else rollout.name,
        frees_cache=rollout.free_cache_engine,
        side_by_side=ahead,
        apart=rollout.nnodes > 0,
        paths={"actor": "actor_rollout_ref.actor", "reference": "actor_rollout_ref.ref", "critic": "critic.model"},
        model_paths={"actor": "actor_rollout_ref.model"} | ({"critic": "critic.model"} if "critic" in models else {}),
        slicing={role: f"{path}.ulysses_sequence_parallel_size" for role, path in SLICERS.items() if role in models},
        tempered=rollout.temperature not in (0.0, 1.0),
    )


def _passes(config: Any) -> list[Pass]:
    """In the order of a step."""
    actor, rollout, ref = (getattr(config.actor_rollout_ref, name) for name in ("actor", "rollout", "ref"))
    plan = plan_ppo(config)
    sizes: dict[str, Any] = {
        "prompt": rollout.prompt_length,
        "response": rollout.response_length,
        "step": plan.sequences_per_step,
        "sharing": actor.ulysses_sequence_parallel_size,
    }
    whole = sizes | {"sequences": max(1, math.ceil(plan.sequences_per_step / plan.data_parallel))}
    names = ("log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")
    passes = []
    if needs_old_log_probs(config, plan.on_policy) and not old_from_engine(config):
        cut = _Cut("actor_rollout_ref.rollout", rollout, *names, rollout.log_prob_use_dynamic_bsz)
        passes.append(_pass("log_prob", "actor", cut, **whole, entropy=True))
    if has_reference(config) and "reference" not in pools(config):
        cut = _Cut("actor_rollout_ref.ref", ref, *names, ref.log_prob_use_dynamic_bsz)
        passes.append(_pass("ref", "actor" if uses_lora(config) else "reference", cut, **whole))
    if has_critic(config) and "critic" not in pools(config):
        passes += _critic_passes(config, whole, plan.prompts_per_step)
    cut = _Cut("actor_rollout_ref.actor", actor, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", actor.use_dynamic_bsz)
    learning = {
        "learns": True,
        "entropy": bool(actor.entropy_coeff),
        "times": actor.ppo_epochs,
        "updates": plan.updates_per_epoch,
    }
    return [*passes, _pass("update_actor", "actor", cut, **sizes, sequences=plan.sequences_per_device, **learning)]


def _critic_passes(config: Any, whole: dict[str, Any], prompts: int) -> list[Pass]:
    critic = config.critic
    sizes = whole | {"sharing": critic.ulysses_sequence_parallel_size}
    cut = _Cut("critic", critic, "forward_micro_batch_size", "forward_max_token_len_per_gpu", critic.use_dynamic_bsz)
    values = _pass("values", "critic", cut, **sizes)
    cut = _Cut("critic", critic, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", critic.use_dynamic_bsz)
    sizes["sequences"] = plan_ppo(config, role="critic").sequences_per_device
    learning = {"learns": True, "times": critic.ppo_epochs, "updates": -(-prompts // critic.ppo_mini_batch_size)}
    return [values, _pass("update_critic", "critic", cut, **sizes, **learning)]


def _sampler(config: Any, cluster: Cluster, actor: TrainedModel) -> Sampler:
    rollout, sequences = config.actor_rollout_ref.rollout, plan_ppo(config).sequences_per_step
    size = rollout.tensor_model_parallel_size
    numbers = dataclasses.replace(actor.numbers, master=actor.numbers.compute)
    baselines = config.data.train_batch_size if "greedy_baseline" in needs(config) else 0
    beside = ahead_of(config).beside or rollout.nnodes > 0
    devices = rollout.nnodes * rollout.n_gpus_per_node or cluster.ranks
    return Sampler(
        actor.shape,
        max(1, math.ceil((sequences + baselines) * size / devices)),
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
    models = {"model": trained(model, model.fsdp_config, config.optim, cluster, config.tensor_parallel_size, scalar=scalar)}
    cut = _Cut("data", data, "micro_batch_size", "max_token_len_per_gpu", data.use_dynamic_bsz)
    sizes: dict[str, Any] = {"prompt": 1, "response": max(1, data.max_length - 1), "step": rows * data.train_batch_size}
    sizes |= {"sharing": config.ulysses_sequence_parallel_size, "sequences": rows * plan.rows_per_device}
    passes = [_pass("update", "model", cut, **sizes, learns=True)]
    if _has_own_reference(config):
        other = dataclasses.replace(model, path=config.ref.path)
        models["reference"] = frozen(other, model.fsdp_config, cluster, config.tensor_parallel_size)
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
