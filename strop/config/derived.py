"""What follows from a configuration without running it. Nothing here imports torch.

- Roles: which models a PPO run has (critic, reference, reward model) and why.
- Asynchronous training: how far sampling runs ahead, and how the loss corrects for stale samples.
- Rollout engine: which engine samples, and whether it has its own copy of the weights.
- Resource pools: roles that run on their own machines.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strop.catalog import ADVANTAGES, ENGINES
from strop.config.hyperparameters import advantage_kwargs
from strop.config.schema.ppo import PpoConfig

if TYPE_CHECKING:
    from strop.config.schema.actor import ActorConfig
    from strop.config.schema.algorithm import RolloutCorrectionConfig
    from strop.config.schema.rollout import RolloutConfig
    from strop.config.schema.roots import RootConfig

# --- Roles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """One model of a run: whether it exists, and the setting that decides it."""

    name: str
    exists: bool
    why: str


def estimator_needs(config: PpoConfig) -> tuple[str, ...]:
    """The inputs that the advantage estimator requires in addition to rewards and mask."""
    if not has_task_reward(config):
        return ()
    return tuple(ADVANTAGES.entry(config.algorithm.adv_estimator).facts["needs"])


def needs_old_log_probs(config: PpoConfig, on_policy: bool) -> bool:
    """Whether log-probs must be computed before the update.

    With one update per step, the log-probs of the update itself are the old ones, also in importance weights
    (not with dropout)."""
    correction = rollout_correction(config)
    estimator_reads_weights = advantage_kwargs(config).may_read("rollout_is_weights")
    return (
        not on_policy
        or config.algorithm.use_kl_in_reward
        or config.algorithm.distillation.is_reward
        or corrects_before_update(config)
        or bool(correction.rollout_is and estimator_reads_weights)
        or bool({"old_log_probs", "sum_pi_squared", "entropy"} & set(estimator_needs(config)))
    )


def corrects_before_update(config: PpoConfig) -> bool:
    """Whether the correction of rollouts comes before the update: rejection and normalised weights need the
    log-probs of the whole batch, and the engine's log-probs are known."""
    correction = rollout_correction(config)
    weights_before = correction.rollout_is_batch_normalize or config.actor_rollout_ref.model.lora_dropout
    return (
        uses_engine_log_probs(config)
        or bool(correction.rollout_rs)
        or bool(correction.rollout_is and weights_before)
    )


def records_experts(config: PpoConfig) -> bool:
    """Whether the rollout engine returns the experts of tokens, which training replays."""
    return config.actor_rollout_ref.actor.router_replay.mode == "R3"


def has_critic(config: PpoConfig) -> bool:
    """Whether the run trains a value model: critic.enable, or the estimator's needs when that is null."""
    if config.critic.enable is None:
        return "values" in estimator_needs(config)
    return config.critic.enable


def has_reference(config: PpoConfig) -> bool:
    """Whether a KL term compares the policy with a frozen reference."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def has_local_teacher(config: PpoConfig) -> bool:
    """Whether the teacher of a distillation is a model on the trainer's devices."""
    teacher = config.algorithm.distillation
    return teacher.enable and bool(teacher.path) and not teacher.nnodes


def has_task_reward(config: PpoConfig) -> bool:
    """Whether scores of responses are trained on. Otherwise a teacher's log-probs are the only signal."""
    distillation = config.algorithm.distillation
    return distillation.task_reward or not distillation.enable


def uses_lora(config: PpoConfig) -> bool:
    """Whether the policy trains LoRA adapters instead of all weights."""
    model = config.actor_rollout_ref.model
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def roles(config: PpoConfig) -> list[Role]:
    """Actor, critic, reference, reward model, greedy baseline: whether each exists, and why."""
    reward = config.reward_model
    found = [
        Role("actor", True, f"trained from {config.actor_rollout_ref.model.path}"),
        Role("critic", has_critic(config), _why_critic(config)),
        Role("reference", has_reference(config), _why_reference(config)),
        Role("reward model", reward.enable or reward.judge.enable, _why_reward_model(config)),
    ]
    teacher = config.algorithm.distillation
    if teacher.enable:
        found.append(Role("teacher", True, f"algorithm.distillation, from {teacher.url or teacher.path}"))
    if "greedy_baseline" in estimator_needs(config):
        why = f"{config.algorithm.adv_estimator} compares with one greedy rollout per prompt"
        found.append(Role("greedy baseline", True, why))
    return found


def _why_critic(config: PpoConfig) -> str:
    if config.critic.enable is not None:
        return f"critic.enable={str(config.critic.enable).lower()}"
    verb = "needs" if has_critic(config) else "does without"
    return f"{config.algorithm.adv_estimator} {verb} values"


def _why_reference(config: PpoConfig) -> str:
    kl_terms = []
    if config.algorithm.use_kl_in_reward:
        kl_terms.append("algorithm.use_kl_in_reward")
    if config.actor_rollout_ref.actor.use_kl_loss:
        kl_terms.append("actor.use_kl_loss")
    if not kl_terms:
        return "no KL term is on"
    why = " and ".join(kl_terms) + " compares with it"
    if uses_lora(config):
        why += "; it is the actor with its adapters switched off"
    return why


def _why_reward_model(config: PpoConfig) -> str:
    reward = config.reward_model
    if reward.enable:
        return f"reward_model.enable, from {reward.remote_url or reward.model.path}"
    if reward.judge.enable:
        return f"reward_model.judge, from {reward.judge.url or reward.model.path}"
    return f"scores come from {config.custom_reward_function.path or 'the scorer of each data_source'}"


# --- Clipping ---------------------------------------------------------------------------------------------


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """(low, high) of the PPO clip: clip_ratio, unless a side has its own key or is in policy_loss.kwargs."""
    low = actor.clip_ratio_low
    if low is None:
        low = actor.clip_ratio
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return _loss_argument(actor, "clip_low", low), _loss_argument(actor, "clip_high", high)


def _loss_argument(actor: ActorConfig, name: str, default: float) -> float:
    """The number that policy_loss.kwargs sets for an argument of the loss, else `default`."""
    value = actor.policy_loss.kwargs.get(name)
    return value if isinstance(value, int | float) else default


# --- Asynchronous training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsyncPlan:
    """The keys of trainer.async_training, resolved to one unit."""

    concurrent: bool
    """Sampling continues while the models train, from a copy of the weights."""
    interrupts: bool
    """A weight sync interrupts responses; they continue under the new weights."""
    age: float
    """Maximum staleness: weight syncs between sampling a response and training on it."""
    sync_steps: int
    """Training steps from one weight sync to the next."""
    between_updates: int
    """Prompts that may start between two weight syncs. 0: each starts when its training step starts."""
    over_sampling: float = 1.0
    """Prompts that a step starts, as a multiple of those that it trains on."""

    @property
    def off_policy(self) -> bool:
        """Whether a step may train on responses of older weights."""
        return self.between_updates > 0 or self.over_sampling > 1


def async_plan(config: PpoConfig) -> AsyncPlan:
    """How far sampling runs ahead of training."""
    settings = config.trainer.async_training
    age: float
    if not (settings.enable or settings.partial_rollout):
        factor = config.actor_rollout_ref.rollout.over_sampling
        age = settings.max_policy_age if factor > 1 else 0
        return AsyncPlan(False, False, age, sync_steps=1, between_updates=0, over_sampling=factor)
    age = settings.max_policy_age
    if settings.staleness_threshold is not None:
        age = settings.staleness_threshold
    steps = settings.trigger_parameter_sync_step if settings.enable else 1
    between = 0
    if age or steps > 1:
        between = math.floor((1 + age) * steps * config.data.train_batch_size)
    return AsyncPlan(settings.enable, settings.partial_rollout, age, steps, between)


def describe_async(config: PpoConfig) -> tuple[str, str] | None:
    """(how far ahead, what that means) as text; None when each step samples what it trains on."""
    plan = async_plan(config)
    if not plan.off_policy:
        return None
    where = "during training" if plan.concurrent else "between steps"
    updates = "weight update" if plan.age == 1 else "weight updates"
    if plan.over_sampling > 1:
        return (
            f"over-sampling by {plan.over_sampling:g}, at most {plan.age:g} {updates} old",
            "prompts that are unfinished when a step has enough continue in the next one; "
            f"{off_policy_remedy(config)}",
        )
    every = "every step" if plan.sync_steps == 1 else f"every {plan.sync_steps} steps"
    interrupted = "interrupted by a weight update" if plan.interrupts else "waited for at a weight update"
    return (
        f"{where}, at most {plan.age:g} {updates} old",
        f"{plan.between_updates} prompts from one weight update ({every}) to the next, {interrupted}; "
        f"{off_policy_remedy(config)}",
    )


def off_policy_remedy(config: PpoConfig) -> str:
    weights = rollout_correction(config).rollout_is
    if weights:
        return f"rollout_is={weights}"
    if uses_engine_log_probs(config):
        return "the engine's log-probs"
    return "no correction"


def rollout_correction(config: PpoConfig) -> RolloutCorrectionConfig:
    """algorithm.rollout_correction; by default token-level weights for stale or quantised rollouts."""
    chosen = config.algorithm.rollout_correction
    is_stale = _is_uncorrected(config) and config.trainer.async_training.compute_prox_log_prob
    if is_stale or corrects_quantization(config):
        chosen = copy.copy(chosen)
        chosen.rollout_is = "token"
    return chosen


def corrects_quantization(config: PpoConfig) -> bool:
    """Whether a quantised engine samples and no correction is chosen (a null threshold: on purpose)."""
    chosen = config.algorithm.rollout_correction
    if not quantized_parts(config) or uses_engine_log_probs(config):
        return False
    return not chosen.rollout_is and not chosen.rollout_rs and chosen.rollout_is_threshold is not None


def quantized_parts(config: PpoConfig) -> dict[str, str]:
    """What the engine has in fewer bits than the model, by key."""
    rollout = config.actor_rollout_ref.rollout
    parts = {}
    if rollout.quantization is not None:
        parts["rollout.quantization"] = f"{rollout.quantization} weights"
    if rollout.kv_cache_dtype.startswith("fp8"):
        parts["rollout.kv_cache_dtype"] = f"{rollout.kv_cache_dtype} KV cache"
    return parts


def uses_engine_log_probs(config: PpoConfig) -> bool:
    """Whether the old log-probs of the PPO ratio are those of the rollout engine."""
    chosen = config.algorithm.rollout_correction.bypass_mode
    if chosen or config.actor_rollout_ref.actor.use_rollout_log_probs:
        return True
    return _is_uncorrected(config) and not config.trainer.async_training.compute_prox_log_prob


def _is_uncorrected(config: PpoConfig) -> bool:
    """Whether responses may be stale and the configuration chooses no correction."""
    chosen = config.algorithm.rollout_correction
    if chosen.rollout_is or chosen.rollout_rs or chosen.bypass_mode:
        return False
    if config.actor_rollout_ref.actor.use_rollout_log_probs:
        return False
    return config.trainer.async_training.use_rollout_log_probs and async_plan(config).off_policy


# --- Rollout engine -----------------------------------------------------------------------------------------

EXTERNAL_ENGINE_KEYS = ("python", "url")
"""Keys of rollout.engine_kwargs.<name> that locate an engine outside this Python environment."""


def missing_library(rollout: RolloutConfig) -> str | None:
    """The library that rollout.name needs and that is not installed, or None."""
    library = ENGINES.entry(rollout.name).facts["library"]
    if library is None:
        return None
    engine_kwargs: Mapping[str, object] = rollout.engine_kwargs.get(rollout.name) or {}
    if any(engine_kwargs.get(key) for key in EXTERNAL_ENGINE_KEYS):
        return None
    if importlib.util.find_spec(library) is not None:
        return None
    return str(library)


def engine_name(rollout: RolloutConfig) -> str:
    """The engine that samples: rollout.name, or native where its library is not installed."""
    return "native" if missing_library(rollout) else rollout.name


def replica_count(rollout: RolloutConfig) -> int:
    """Engines on their own machines; 0: the engine shares the trainer's machines."""
    devices_per_engine = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return rollout.nnodes * rollout.n_gpus_per_node // devices_per_engine


def holds_weights(rollout: RolloutConfig) -> bool:
    """Whether the engine has its own copy of the weights, which every weight sync must update."""
    return rollout.nnodes > 0 or bool(ENGINES.entry(engine_name(rollout)).facts["own_weights"])


def prefill_token_budget(max_num_batched_tokens: int | None, *, on_cpu: bool) -> int:
    """Prompt tokens that the native engine prefills in one forward pass."""
    if max_num_batched_tokens is not None:
        return max_num_batched_tokens
    return 8192 if on_cpu else 32768


# --- Resource pools -----------------------------------------------------------------------------------------


class DevicePool(Protocol):
    """A section that says how many machines it has, and how many devices each."""

    nnodes: int
    n_gpus_per_node: int


def resource_pools(config: RootConfig) -> dict[str, DevicePool]:
    """Role -> section, for each role that has its own machines."""
    if not isinstance(config, PpoConfig):
        return {}
    found: dict[str, DevicePool] = {}
    group = config.actor_rollout_ref
    if group.rollout.nnodes > 0:
        found["rollout"] = group.rollout
    if group.ref.nnodes > 0 and has_reference(config) and not uses_lora(config):
        found["reference"] = group.ref
    teacher = config.algorithm.distillation
    if teacher.nnodes > 0 and teacher.enable and not teacher.url:
        found["teacher"] = teacher
    if config.critic.nnodes > 0 and has_critic(config):
        found["critic"] = config.critic
    reward = config.reward_model
    if reward.enable_resource_pool and reward.enable and not reward.remote_url:
        found["reward"] = reward
    return found


def device_count(section: DevicePool) -> int:
    """Devices of a section: machines times devices per machine."""
    return section.nnodes * section.n_gpus_per_node
