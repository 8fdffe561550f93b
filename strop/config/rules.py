"""Rules between keys. Each finding says what clashes, with the values, and what to set.

An *error* stops a run before it starts; a *warning* says that something probably does not do what was meant.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from strop.catalog import ADVANTAGES, PREFERENCE_LOSSES, TRACKERS
from strop.config.arithmetic import plan_ppo
from strop.config.asynchrony import ahead_of, correction_of
from strop.config.compose import Loaded
from strop.config.engine import engine_name, holds_weights, missing_library
from strop.config.objective import has_critic, has_reference, needs, objective, uses_lora
from strop.config.pools import devices_of, pools
from strop.registry import did_you_mean

OTHER_TRACKERS = ("clearml", "vemlp_wandb")
"""Of verl, not of Strop."""

ELSEWHERE = (
    "log_val_generations",
    "rollout_data_dir",
    "validation_data_dir",
    "critic_warmup",
    "record_steps",
    "max_actor_ckpt_to_keep",
    "max_critic_ckpt_to_keep",
    "async_training.enable",
)
"""Keys of the trainer section that only reinforcement learning reads."""


@dataclass(frozen=True)
class Finding:
    level: str  # "error" or "warning"
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


Findings = Iterator[Finding]


def error(key: str, message: str) -> Finding:
    return Finding("error", key, message)


def warning(key: str, message: str) -> Finding:
    return Finding("warning", key, message)


def check(loaded: Loaded) -> list[Finding]:
    """Every rule that applies to this kind of configuration."""
    return [finding for rule in RULES[loaded.root] for finding in rule(loaded.config, loaded)]


def around(value: int, divisor: int) -> str:
    """The nearest multiples of `divisor` on both sides of `value`."""
    below, above = value // divisor * divisor, -(-value // divisor) * divisor
    return " or ".join(str(v) for v in dict.fromkeys((below, above)) if v > 0)


def inputs(config: Any, loaded: Loaded) -> Findings:
    if config.actor_rollout_ref.model.path is None:
        yield error("actor_rollout_ref.model.path", "not set. Name the model to train: a folder, a hub name or a .gguf file.")
    if not config.data.train_files:
        yield error("data.train_files", "not set. Name one or more parquet, json or jsonl files (`strop data` makes some).")
    if config.trainer.val_only and not config.data.val_files:
        yield error("data.val_files", "trainer.val_only=true needs files to validate on.")
    reward = config.reward_model
    if reward.enable and not (reward.model.path or reward.remote_url):
        yield error(
            "reward_model.model.path", "reward_model.enable=true needs reward_model.model.path or reward_model.remote_url."
        )
    judge = reward.judge
    if judge.enable and (reward.enable or reward.remote_url):
        yield error("reward_model.judge.enable", "scores come from a judge or from a reward model, not both. Switch one off.")
    if judge.enable and not (judge.url or reward.model.path):
        yield error(
            "reward_model.judge.url", "reward_model.judge.enable=true needs reward_model.judge.url or reward_model.model.path."
        )
    for section in ("data.custom_cls",):
        own = config.data.custom_cls
        if (own.path is None) != (own.name is None):
            yield error(section, f"path={own.path!r} and name={own.name!r}: set both or neither.")


def batches(config: Any, loaded: Loaded) -> Findings:
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    sp, tp = actor.ulysses_sequence_parallel_size, actor.tensor_parallel_size
    if devices % (sp * tp):
        yield error(
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            f"{devices} devices (nnodes {trainer.nnodes} x n_gpus_per_node {trainer.n_gpus_per_node}) cannot be divided into "
            f"groups of {sp} (sequence) x {tp} (tensor). Use {around(devices, sp * tp)} devices, or divisors of {devices}.",
        )
        return
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    sections = [("actor_rollout_ref.actor", actor, "actor")]
    if has_critic(config):
        sections.append(("critic", config.critic, "critic"))
    for path, section, role in sections:
        mini = section.ppo_mini_batch_size
        if mini > prompts:
            yield error(
                f"{path}.ppo_mini_batch_size",
                f"{mini} prompts per update, but a step has only data.train_batch_size={prompts}. "
                f"Set it to {prompts} (one update per step) or to a divisor of {prompts}.",
            )
            continue
        if prompts % mini:
            yield warning(
                f"{path}.ppo_mini_batch_size",
                f"{mini} does not divide data.train_batch_size={prompts}: the last update of a step has {prompts % mini}. "
                f"data.train_batch_size={around(prompts, mini)} would be even.",
            )
        plan = plan_ppo(config, role=role)
        if (mini * n) % plan.data_parallel:
            yield error(
                f"{path}.ppo_mini_batch_size",
                f"{mini} prompts x rollout.n {n} = {mini * n} sequences cannot be shared by {plan.data_parallel} ranks. "
                f"Set it to {_mini_near(mini, n, plan.data_parallel)}.",
            )
        yield from _micro(path, section, plan.data_parallel, plan.sequences_per_device)
        if section.use_dynamic_bsz:
            longest = config.data.max_prompt_length + config.data.max_response_length
            longest = min(longest, config.actor_rollout_ref.rollout.max_model_len or longest)
            budget = section.ppo_max_token_len_per_gpu * sp
            if budget < longest:
                yield error(
                    f"{path}.ppo_max_token_len_per_gpu",
                    f"{section.ppo_max_token_len_per_gpu} tokens (x {sp} by sequence parallelism) cannot hold one sequence of "
                    f"max_prompt_length + max_response_length = {longest}. Set at least {-(-longest // sp)}.",
                )


def _mini_near(mini: int, n: int, ranks: int) -> str:
    good = [m for m in range(max(1, mini - ranks), mini + ranks + 1) if (m * n) % ranks == 0]
    below, above = [m for m in good if m < mini], [m for m in good if m > mini]
    return " or ".join(str(m) for m in (below[-1:] + above[:1]))


def _micro(path: str, section: Any, ranks: int, local: int) -> Findings:
    old, new = section.ppo_micro_batch_size, section.ppo_micro_batch_size_per_gpu
    if old is not None and new is not None:
        yield error(
            f"{path}.ppo_micro_batch_size",
            f"set together with ppo_micro_batch_size_per_gpu ({old} over all devices, {new} per device). Keep only the latter.",
        )
    elif old is not None and old % ranks:
        yield error(
            f"{path}.ppo_micro_batch_size",
            f"{old} sequences over all devices cannot be shared by {ranks} ranks. Set {around(old, ranks)}, or better "
            f"ppo_micro_batch_size_per_gpu={max(1, old // ranks)}.",
        )
    if new is not None and not section.use_dynamic_bsz and new < local and local % new:
        yield warning(
            f"{path}.ppo_micro_batch_size_per_gpu",
            f"{new} does not divide the {local} sequences of an update per device: the last micro-batch has {local % new}. "
            "The result is the same; a divisor is a little faster.",
        )


def sampling(config: Any, loaded: Loaded) -> Findings:
    rollout, n = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.n
    greedy = rollout.temperature == 0 or not rollout.do_sample
    if greedy and n > 1:
        yield error(
            "actor_rollout_ref.rollout.n",
            f"{n} samples per prompt with temperature={rollout.temperature:g} and do_sample={str(rollout.do_sample).lower()} "
            "would all be the same. Set temperature above 0 and do_sample=true.",
        )
    val = rollout.val_kwargs
    if val.temperature == 0 and (val.n > 1 or val.do_sample):
        yield warning(
            "actor_rollout_ref.rollout.val_kwargs",
            f"temperature=0 is greedy, so n={val.n} and do_sample={str(val.do_sample).lower()} change nothing. "
            "Set val_kwargs.temperature to sample.",
        )
    if val.temperature > 0 and not val.do_sample and "actor_rollout_ref.rollout.val_kwargs.do_sample" in loaded.set_by_user:
        yield warning(
            "actor_rollout_ref.rollout.val_kwargs.do_sample",
            f"false, but val_kwargs.temperature={val.temperature:g} samples all the same. Set the temperature to 0 for greedy.",
        )
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield warning(
            "actor_rollout_ref.rollout.max_model_len",
            f"{rollout.max_model_len} is less than prompt_length + response_length = {longest}: long prompts get less.",
        )
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.nnodes:
        devices = rollout.nnodes * rollout.n_gpus_per_node
        yield from replicas(config, rollout, size)
    yield from weight_transport(rollout, loaded)
    if devices % size:
        yield error(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            f"{devices} devices cannot be divided into engines of {size}. Set a divisor of {devices}.",
        )
    if rollout.expert_parallel_size > 1 and rollout.expert_parallel_size != size:
        yield error(
            "actor_rollout_ref.rollout.expert_parallel_size",
            f"{rollout.expert_parallel_size} must equal tensor_model_parallel_size x data_parallel_size = {size}.",
        )
    yield from engine("actor_rollout_ref.rollout", rollout)


def replicas(config: Any, rollout: Any, size: int) -> Findings:
    key = "actor_rollout_ref.rollout.nnodes"
    if config.trainer.runtime == "local":
        yield error(key, f"{rollout.nnodes} machines that only sample need trainer.runtime=ray (or auto), not local.")
    path = str(config.actor_rollout_ref.model.path)
    if (path.endswith(".gguf") or path.lower() == "smollm2-135m") and engine_name(rollout) != "native":
        yield error(
            key,
            f"{rollout.name} replicas read a Hugging Face folder, but model.path={path} is a GGUF file. Set "
            "rollout.name=native, or convert the model first.",
        )
    if size > 1 and engine_name(rollout) == "native":
        yield error(
            key,
            f"native replicas have one device each, but tensor_model_parallel_size x data_parallel_size is {size}. Set both "
            "to 1, or rollout.name=vllm.",
        )
    elif rollout.n_gpus_per_node % size:
        yield error(key, f"an engine of {size} devices does not fit rollout.n_gpus_per_node={rollout.n_gpus_per_node}.")


def weight_transport(rollout: Any, loaded: Loaded) -> Findings:
    path, settings = "actor_rollout_ref.rollout.checkpoint_engine", rollout.checkpoint_engine
    if not rollout.nnodes:
        if settings.backend != "naive" and f"{path}.backend" in loaded.set_by_user:
            yield warning(
                f"{path}.backend",
                f"{settings.backend} has no effect without rollout.nnodes: the engine is on the trainer's machines.",
            )
        return
    if settings.backend in ("nixl", "hccl"):
        yield error(
            f"{path}.backend",
            f"{settings.backend} is not there. Set nccl (a broadcast; by gloo between machines without CUDA), naive (Ray's "
            "object store) or file (a folder that all machines see).",
        )
    for name in settings.engine_kwargs:
        if name != "folder":
            yield error(f"{path}.engine_kwargs", f"unknown setting {name!r}. There is folder, for backend=file.")
        elif settings.backend != "file":
            yield warning(f"{path}.engine_kwargs", f"folder has no effect with backend={settings.backend}. Set backend=file.")


def own_pools(config: Any, loaded: Loaded) -> Findings:
    """Machines of the reference, of the critic and of the reward model."""
    ref, reward, own = config.actor_rollout_ref.ref, config.reward_model, pools(config)
    key = "actor_rollout_ref.ref.nnodes"
    if ref.nnodes and not has_reference(config):
        yield warning(key, f"{ref.nnodes}, but the run has no reference (algorithm.use_kl_in_reward, actor.use_kl_loss).")
    elif ref.nnodes and uses_lora(config):
        yield error(key, f"{ref.nnodes}, but the reference of a LoRA run is the actor without its adapters. Set 0.")
    if "critic" in own and config.trainer.record_steps:
        yield error("critic.nnodes", f"{config.critic.nnodes}: trainer.record_steps stores what one process learns. Set 0.")
    if reward.enable_resource_pool and min(reward.nnodes, reward.n_gpus_per_node) < 1:
        yield error(
            "reward_model.enable_resource_pool",
            f"true, with reward_model.nnodes={reward.nnodes} and n_gpus_per_node={reward.n_gpus_per_node}. Set both above 0.",
        )
    elif reward.enable_resource_pool and reward.judge.enable and not reward.judge.url:
        yield error(
            "reward_model.enable_resource_pool",
            "true, but a judge that runs here shares the actor's devices. Serve it elsewhere (reward_model.judge.url), or "
            "set false.",
        )
    elif reward.enable_resource_pool and "reward" not in own:
        yield warning("reward_model.enable_resource_pool", "true, but the run has no reward model of its own.")
    if config.trainer.runtime == "local" and own.keys() - {"rollout"}:
        asked = " and ".join(f"the {role} model" for role in own if role != "rollout")
        yield error("trainer.runtime", f"local, but {asked} asks for machines of its own. Set ray (or auto).")


def engine(section: str, rollout: Any) -> Findings:
    missing = missing_library(rollout)
    if missing is None:
        return
    way = (
        f"Install 'strop[{rollout.name}]', or name the interpreter of an environment that has it in "
        f"{section}.engine_kwargs.{rollout.name}.python, or set name=native."
    )
    if rollout.strict:
        yield error(f"{section}.name", f"{missing} is not installed and {section}.strict=true. {way}")
    else:
        yield warning(
            f"{section}.name",
            f"{missing} is not installed; the native engine samples instead ({section}.strict=true would refuse). {way}",
        )


def estimators(config: Any, loaded: Loaded) -> Findings:
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    name = algorithm.adv_estimator
    facts = ADVANTAGES.entry(name).facts
    if n < facts["min_group"]:
        yield error(
            "actor_rollout_ref.rollout.n",
            f"{name} compares samples of one prompt and needs at least {facts['min_group']}, got n={n}. Set rollout.n=8, say.",
        )
    elif n == 1 and "group" in facts["needs"]:
        yield warning(
            "actor_rollout_ref.rollout.n",
            f"{name} compares the samples of one prompt, but n=1: there is no baseline. Set rollout.n=8, say.",
        )
    if config.critic.enable is False and "values" in needs(config):
        yield error(
            "critic.enable", f"false, but {name} needs values. Leave it unset, or choose grpo, rloo, reinforce_plus_plus ..."
        )
    if not has_critic(config):
        said = [path for path in loaded.set_by_user if path.startswith("critic.")]
        if said:
            others = f" (the same holds for {len(said) - 1} more critic.* keys)" if said[1:] else ""
            yield warning(said[0], f"no effect: {name} needs no critic{others}.")
        if config.trainer.critic_warmup > 1:
            yield warning(
                "trainer.critic_warmup",
                f"{config.trainer.critic_warmup}, but {name} has no critic: nothing is trained before that step. Set it to 0.",
            )
    parts, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if "reward_components" in facts["needs"] and not parts:
        yield warning(
            "algorithm.gdpo_reward_keys", f"not set, so {name} sees the score as its only part, which is grpo whitened."
        )
    if weights is not None and len(weights) != len(parts or ["score"]):
        yield error("algorithm.gdpo_reward_weights", f"{len(weights)} weights for {len(parts or ['score'])} parts ({parts}).")
    groups = algorithm.filter_groups
    if groups.enable and n == 1:
        yield error(
            "algorithm.filter_groups.enable", "dynamic sampling compares the samples of one prompt; set rollout.n above 1."
        )
    for key, pair in (
        ("algorithm.filter_groups.range", groups.range),
        ("reward_model.clip_range", config.reward_model.clip_range),
    ):
        if pair is not None and (len(pair) != 2 or pair[0] >= pair[1]):
            yield error(key, f"expected [low, high] with low < high, got {pair}.")
    correction = correction_of(config)
    if (correction.rollout_is or correction.rollout_rs or correction.bypass_mode) and not (
        config.actor_rollout_ref.rollout.calculate_log_probs
    ):
        yield error(
            "actor_rollout_ref.rollout.calculate_log_probs",
            "false, but algorithm.rollout_correction compares with the engine's log-probs. Set it to true.",
        )
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        yield error("algorithm.rollout_correction.rollout_rs_threshold", f"rollout_rs={correction.rollout_rs!r} needs bounds.")


def ahead(config: Any, loaded: Loaded) -> Findings:
    """Sampling that runs ahead of training."""
    settings, trainer, said = config.trainer.async_training, config.trainer, loaded.set_by_user
    path, plan = "trainer.async_training", ahead_of(config)
    if not (plan.beside or plan.cut):
        for key in sorted(key for key in said if key.startswith(path) and said[key] not in (False, None)):
            yield warning(key, f"{said[key]} has no effect without {path}.enable=true or {path}.partial_rollout=true.")
        return
    bounds = (settings.staleness_threshold, said.get(f"{path}.max_policy_age"))
    if None not in bounds and bounds[0] != bounds[1]:
        yield error(
            f"{path}.staleness_threshold",
            f"{bounds[0]:g} and max_policy_age={bounds[1]} are names of the same bound. Keep one.",
        )
    prompts, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if settings.require_batches is not None and settings.require_batches * mini != prompts:
        yield error(
            f"{path}.require_batches",
            f"{settings.require_batches} mini-batches of ppo_mini_batch_size={mini} make a step of "
            f"{settings.require_batches * mini} prompts, but data.train_batch_size={prompts}. Set it to "
            f"{settings.require_batches * mini}, or leave require_batches unset.",
        )
    if plan.off_policy and config.data.sampler.class_path:
        yield error(
            "data.sampler.class_path",
            "a curriculum chooses rows by what came of the step before, but rows are drawn ahead of training. "
            f"Set {path}.max_policy_age=0, or do without data.sampler.",
        )
    parts = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if parts > 1 and not holds_weights(config.actor_rollout_ref.rollout):
        yield error(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            f"{parts} ranks sample together in the native engine, but with {path} each is interrupted at a moment of its own. "
            "Set it to 1, or use an engine with weights of its own (vllm, sglang).",
        )
    every = settings.trigger_parameter_sync_step
    if every > 1 and not plan.beside:
        yield warning(f"{path}.trigger_parameter_sync_step", f"{every} has no effect without {path}.enable=true.")
    elif every > 1 and trainer.test_freq > 0 and trainer.test_freq % every:
        yield error(
            "trainer.test_freq",
            f"{trainer.test_freq}: the engine has the weights of a step only every {every} steps "
            f"({path}.trigger_parameter_sync_step). Set test_freq to {around(trainer.test_freq, every)}.",
        )
    if plan.beside and said.get("actor_rollout_ref.rollout.free_cache_engine"):
        yield warning("actor_rollout_ref.rollout.free_cache_engine", f"no effect: with {path}.enable the engine never rests.")
    if plan.off_policy and not settings.use_rollout_log_probs:
        yield warning(
            f"{path}.use_rollout_log_probs",
            "false: answers of older weights are trained on as if they were new. Leave it true unless you compare.",
        )


def inert_values(config: Any, loaded: Loaded) -> Findings:
    """Values that were set but that another setting switches off."""
    said, actor, algorithm = loaded.set_by_user, config.actor_rollout_ref.actor, config.algorithm
    path = "actor_rollout_ref.actor"
    given = [f"{path}.clip_ratio_{side}" for side in ("low", "high") if said.get(f"{path}.clip_ratio_{side}") is not None]
    if f"{path}.clip_ratio" in said and len(given) == 2:
        low, high = actor.clip_ratio_low, actor.clip_ratio_high
        if not low == high == actor.clip_ratio:
            yield warning(
                f"{path}.clip_ratio",
                f"{actor.clip_ratio:g} has no effect: clip_ratio_low={low:g} and clip_ratio_high={high:g} are set instead.",
            )
    if not algorithm.use_kl_in_reward:
        for key in sorted(k for k in said if k.startswith("algorithm.kl_ctrl.") or k == "algorithm.kl_penalty"):
            yield warning(key, f"{said[key]} has no effect without algorithm.use_kl_in_reward=true.")
    if not actor.use_kl_loss:
        for key in (f"{path}.kl_loss_coef", f"{path}.kl_loss_type"):
            if key in said:
                yield warning(key, f"{said[key]} has no effect without {path}.use_kl_loss=true.")
    for key, on, chosen in (
        ("algorithm.kl_penalty", algorithm.use_kl_in_reward, algorithm.kl_penalty),
        (f"{path}.kl_loss_type", actor.use_kl_loss, actor.kl_loss_type),
    ):
        if on and chosen.removesuffix("+") == "full":
            yield error(key, "full needs the logits of both models, which are never kept. Choose low_var_kl (k3), k2 or k1.")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield warning("algorithm.use_kl_in_reward", f"the KL acts twice, in the reward and in the loss: {objective(config)}.")
    if config.actor_rollout_ref.model.lora_rank and has_reference(config) and config.actor_rollout_ref.ref.model:
        yield warning(
            "actor_rollout_ref.ref.model", "with LoRA the reference is the actor without adapters; this section is not read."
        )


def run(config: Any, loaded: Loaded) -> Findings:
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        yield error("actor_rollout_ref.actor.strategy", "the Megatron backend is not there yet. Use fsdp (FSDP2), or single.")
    yield from any_run(trainer, loaded)
    if trainer.record_steps and (trainer.nnodes * trainer.n_gpus_per_node > 1 or trainer.async_training.enable):
        yield error(
            "trainer.record_steps",
            "a step is stored by one process that samples and learns in turn. Record with one device, without async_training.",
        )
    if trainer.save_freq <= 0:
        yield warning("trainer.save_freq", f"{trainer.save_freq}: no checkpoint is ever written, not even at the end.")
    for section in ("actor_rollout_ref.actor", "critic"):
        optim = (actor if section != "critic" else config.critic).optim
        yield from betas(f"{section}.optim.betas", optim.betas)
    yield from shared_matrices(config)
    for section, model, size in (
        ("actor_rollout_ref", config.actor_rollout_ref.model, actor.ulysses_sequence_parallel_size),
        ("critic", config.critic.model, config.critic.ulysses_sequence_parallel_size),
    ):
        if size > 1 and not model.use_remove_padding:
            yield error(
                f"{section}.model.use_remove_padding", f"false, but sequence parallelism of {size} needs packed sequences."
            )


def tensor_parallel(key: str, section: Any, model: Any, devices: int) -> Findings:
    """What sharing the matrices of one model does not go together with."""
    size, sp = section.tensor_parallel_size, section.ulysses_sequence_parallel_size
    if size > 1 and sp > 1:
        yield error(
            key,
            f"{size} with ulysses_sequence_parallel_size={sp}: ranks share matrices or rows, not both. Set one of them to 1.",
        )
    if size > 1 and (model.lora_rank or model.lora_adapter_path):
        yield error(key, f"{size} does not go together with LoRA. Set it to 1.")
    if devices % size:
        yield error(key, f"{size} does not divide the {devices} devices.")


def shared_matrices(config: Any) -> Findings:
    """What tensor parallelism does not go together with."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    of_critic = devices_of(config.critic) if "critic" in pools(config) else devices
    for path, section, model, shared_by in (
        ("actor_rollout_ref.actor", actor, config.actor_rollout_ref.model, devices),
        ("critic", config.critic, config.critic.model, of_critic),
    ):
        yield from tensor_parallel(f"{path}.tensor_parallel_size", section, model, shared_by)
    if devices == 1 and actor.fsdp_config.param_offload and not holds_weights(rollout):
        yield warning(
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "no effect on one device: the engine samples from the actor's own weights. optimizer_offload parks the rest.",
        )
    size = rollout.tensor_model_parallel_size
    if size > 1 and engine_name(rollout) == "native" and rollout.multi_turn.enable:
        yield error(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            f"{size}: the native engine holds conversations on one device. Set 1, or use vLLM (name=vllm, installed).",
        )
    if size > 1 and engine_name(rollout) == "hf":
        yield error("actor_rollout_ref.rollout.tensor_model_parallel_size", f"{size}: rollout.name=hf samples on one device.")


def any_run(trainer: Any, loaded: Loaded) -> Findings:
    """What every kind of training has: resuming, trackers, a device."""
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        if not path or "global_step_" not in path:
            yield error(
                "trainer.resume_from_path", f"trainer.resume_mode=resume_path needs a global_step_N folder, got {path!r}."
            )
    elif trainer.resume_from_path and "trainer.resume_mode" not in loaded.set_by_user:
        yield warning("trainer.resume_from_path", "no effect: set trainer.resume_mode=resume_path to use it.")
    for name in [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger:
        if name in OTHER_TRACKERS:
            yield warning("trainer.logger", f"{name} is left out; there are {', '.join(TRACKERS.names())}.")
        elif name not in TRACKERS:
            yield error("trainer.logger", f"unknown tracker {name!r}.{did_you_mean(name, TRACKERS.names())}")
        elif (library := TRACKERS.entry(name).facts["library"]) and importlib.util.find_spec(library) is None:
            yield error(
                "trainer.logger", f"{name} is not installed here: pip install 'strop[{library}]', or take it out of the list."
            )
    if trainer.device == "npu":
        yield error("trainer.device", "Ascend devices are not supported. Use cuda or cpu.")


def betas(key: str, values: list[float]) -> Findings:
    if len(values) != 2 or not all(0 <= b < 1 for b in values):
        yield error(key, f"expected two numbers in [0, 1), got {values}.")


def supervised(config: Any, loaded: Loaded) -> Findings:
    if config.model.path is None:
        yield error("model.path", "not set. Name the model to train: a folder, a hub name or a .gguf file.")
    if not config.data.train_files:
        yield error("data.train_files", "not set. Name one or more parquet, json or jsonl files.")
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    sp, tp = config.ulysses_sequence_parallel_size, config.tensor_parallel_size
    yield from tensor_parallel("tensor_parallel_size", config, config.model, devices)
    if devices % sp:
        yield error("ulysses_sequence_parallel_size", f"{sp} does not divide the {devices} devices.")
    elif devices % (sp * tp) == 0 and config.data.train_batch_size % (devices // (sp * tp)):
        ranks = devices // (sp * tp)
        yield error(
            "data.train_batch_size",
            f"{config.data.train_batch_size} rows cannot be shared by {ranks} ranks. "
            f"Set {around(config.data.train_batch_size, ranks)}.",
        )
    if config.data.use_dynamic_bsz and config.data.max_token_len_per_gpu * sp < config.data.max_length:
        yield error(
            "data.max_token_len_per_gpu",
            f"{config.data.max_token_len_per_gpu} tokens cannot hold a row of data.max_length={config.data.max_length}.",
        )
    if config.model.strategy == "megatron":
        yield error("model.strategy", "the Megatron backend is not there yet. Use fsdp2.")
    for key in ("save_freq", "test_freq"):
        value = getattr(config.trainer, key)
        if isinstance(value, str) and value != "after_each_epoch":
            yield error(f"trainer.{key}", f"expected a number of steps or after_each_epoch, got {value!r}.")
    yield from betas("optim.betas", config.optim.betas)
    yield from any_run(config.trainer, loaded)
    for key in ELSEWHERE:
        if f"trainer.{key}" in loaded.set_by_user:
            yield warning(f"trainer.{key}", "no effect in supervised training.")
    if config.trainer.val_only and not config.data.val_files:
        yield error("data.val_files", "trainer.val_only=true needs files to validate on.")


def pairs(config: Any, loaded: Loaded) -> Findings:
    data, loss = config.data, config.loss
    sp = config.ulysses_sequence_parallel_size
    if data.use_dynamic_bsz and data.max_length <= data.max_token_len_per_gpu * sp < 2 * data.max_length:
        yield error(
            "data.max_token_len_per_gpu",
            f"{data.max_token_len_per_gpu} tokens cannot hold the two answers of a pair, each up to data.max_length="
            f"{data.max_length}. Set it to {2 * data.max_length} or more.",
        )
    entry = PREFERENCE_LOSSES.entry("sigmoid" if loss.type == "logsigmoid" else loss.type)
    wanted = "scores" if loaded.root == "rm_trainer" else "log_probs"
    if wanted not in entry.facts["needs"]:
        known = [name for name in PREFERENCE_LOSSES.names() if wanted in PREFERENCE_LOSSES.entry(name).facts["needs"]]
        yield error("loss.type", f"{loss.type} compares the scores of a reward model. Choose one of {', '.join(known)}.")
        return
    for term in ("margin", "label_smoothing", "target_margin", "nll_coef"):
        if getattr(loss, term, False) and term not in entry.facts["terms"]:
            yield warning(f"loss.{term}", f"{getattr(loss, term)} has no effect: {loss.type} has no such term.")
    if getattr(loss, "label_smoothing", 0.0) >= 0.5:
        yield error("loss.label_smoothing", "0.5: half of all labels wrong is no information. Set it below 0.5.")
    if wanted == "scores" and config.model.aux_loss_coef:
        yield error("model.aux_loss_coef", "a reward model has no load-balancing loss. Set it to 0.")


def generation(config: Any, loaded: Loaded) -> Findings:
    for key, value in (
        ("model.path", config.model.path),
        ("data.path", config.data.path),
        ("data.output_path", config.data.output_path),
    ):
        if not value:
            yield error(key, "not set.")
    if config.rollout.temperature == 0 and config.data.n_samples > 1:
        yield error(
            "data.n_samples", f"{config.data.n_samples} samples at temperature 0 would all be the same. Set n_samples=1."
        )
    yield from engine("rollout", config.rollout)


def evaluation(config: Any, loaded: Loaded) -> Findings:
    if not config.data.path:
        yield error("data.path", "not set. Name a parquet file with responses (`strop generate` makes one).")


def reward_server(config: Any, loaded: Loaded) -> Findings:
    if not config.model.path:
        yield error("model.path", "not set. Name the folder of a reward model (`strop rm` makes one).")


PPO: tuple[Callable[[Any, Loaded], Findings], ...] = (
    inputs,
    batches,
    sampling,
    own_pools,
    estimators,
    ahead,
    inert_values,
    run,
)
RULES: dict[str, tuple[Callable[[Any, Loaded], Findings], ...]] = {
    "ppo_trainer": PPO,
    "ppo_megatron_trainer": PPO,
    "sft_trainer": (supervised,),
    "rm_trainer": (supervised, pairs),
    "dpo_trainer": (supervised, pairs),
    "generation": (generation,),
    "evaluation": (evaluation,),
    "reward_server": (reward_server,),
}
