"""Rules of sampling that runs ahead of training: `trainer.async_training` and `rollout.over_sampling`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.derived import AsyncPlan, async_plan, holds_weights
from strop.config.rules.findings import Findings, error, nearest_multiples, warning

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig

ASYNC = "trainer.async_training"
ROLLOUT = "actor_rollout_ref.rollout"
OVER_SAMPLING = f"{ROLLOUT}.over_sampling"
KEYS_OF_OVER_SAMPLING = ("max_policy_age", "use_rollout_log_probs", "compute_prox_log_prob")
"""Keys of trainer.async_training that over-sampling reads too."""


def run_ahead(loaded: Loaded[PpoConfig]) -> Findings:
    """The bounds, the size of a step, and what does not work while sampling runs ahead."""
    plan = async_plan(loaded.config)
    yield from _over_sampling(loaded.config)
    if not (plan.concurrent or plan.interrupts):
        yield from _keys_without_effect(loaded, plan)
        if plan.off_policy:
            yield from _unsupported(loaded.config, plan)
            yield from _uncorrected(loaded.config)
        return
    yield from _staleness_bound(loaded)
    yield from _batches_per_step(loaded.config)
    yield from _unsupported(loaded.config, plan)
    yield from _weight_sync_interval(loaded.config, plan)
    if plan.concurrent and loaded.set_by_user.get("actor_rollout_ref.rollout.free_cache_engine"):
        yield warning(
            "actor_rollout_ref.rollout.free_cache_engine",
            f"no effect: with {ASYNC}.enable the engine never rests.",
        )
    if plan.off_policy:
        yield from _uncorrected(loaded.config)


def _uncorrected(config: PpoConfig) -> Findings:
    if not config.trainer.async_training.use_rollout_log_probs:
        yield warning(
            f"{ASYNC}.use_rollout_log_probs",
            "false: answers of older weights are trained on as if they were new. Leave it true unless you "
            "compare.",
        )


def _over_sampling(config: PpoConfig) -> Findings:
    """Over-sampling carries prompts over one step at a time, which other ways to run ahead do differently."""
    rollout = config.actor_rollout_ref.rollout
    factor = rollout.over_sampling
    if factor == 1:
        return
    settings = config.trainer.async_training
    if settings.enable or settings.partial_rollout:
        yield error(
            OVER_SAMPLING,
            f"{factor:g} with {ASYNC}.enable={str(settings.enable).lower()} and partial_rollout="
            f"{str(settings.partial_rollout).lower()}: both start prompts of later steps. Set "
            f"{OVER_SAMPLING}=1, or {ASYNC}.enable=false and {ASYNC}.partial_rollout=false.",
        )
    if settings.max_policy_age == 0:
        yield error(
            OVER_SAMPLING,
            f"{factor:g} trains on answers that older weights began, but {ASYNC}.max_policy_age=0 forbids "
            f"them. Set {ASYNC}.max_policy_age to at least 1, or {OVER_SAMPLING}=1.",
        )
    prompts = config.data.train_batch_size
    if config.algorithm.filter_groups.enable:
        prompts = config.data.gen_batch_size or prompts
    if round(factor * prompts) == prompts:
        yield error(
            OVER_SAMPLING,
            f"{factor:g} times {prompts} prompts are {prompts} prompts: nothing is over-sampled. Set it to "
            f"at least {(prompts + 1) / prompts:.3g}, or to 1.",
        )
    if rollout.multi_turn.enable or rollout.agent.command is not None:
        yield error(
            OVER_SAMPLING,
            f"{factor:g} with conversations ({ROLLOUT}.multi_turn.enable=true or {ROLLOUT}.agent.command), "
            f"which cannot be cut and saved. Set {OVER_SAMPLING}=1, and {ASYNC}.partial_rollout=true to "
            "sample conversations ahead.",
        )


def _keys_without_effect(loaded: Loaded[PpoConfig], plan: AsyncPlan) -> Findings:
    for key in sorted(loaded.set_by_user):
        value = loaded.set_by_user[key]
        if plan.off_policy and key.removeprefix(f"{ASYNC}.") in KEYS_OF_OVER_SAMPLING:
            continue
        if key.startswith(ASYNC) and value not in (False, None):
            yield warning(
                key, f"{value} has no effect without {ASYNC}.enable=true or {ASYNC}.partial_rollout=true."
            )


def _staleness_bound(loaded: Loaded[PpoConfig]) -> Findings:
    """staleness_threshold and max_policy_age name the same bound."""
    threshold = loaded.config.trainer.async_training.staleness_threshold
    max_age = loaded.set_by_user.get(f"{ASYNC}.max_policy_age")
    if threshold is not None and max_age is not None and threshold != max_age:
        yield error(
            f"{ASYNC}.staleness_threshold",
            f"{threshold:g} and max_policy_age={max_age} are names of the same bound. Keep one.",
        )


def _batches_per_step(config: PpoConfig) -> Findings:
    """require_batches mini-batches make a step of train_batch_size prompts."""
    batches = config.trainer.async_training.require_batches
    prompts = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batches is not None and batches * mini != prompts:
        yield error(
            f"{ASYNC}.require_batches",
            f"{batches} mini-batches of ppo_mini_batch_size={mini} make a step of {batches * mini} prompts, "
            f"but data.train_batch_size={prompts}. Set it to {batches * mini}, or leave "
            f"{ASYNC}.require_batches unset.",
        )


def _unsupported(config: PpoConfig, plan: AsyncPlan) -> Findings:
    """A curriculum needs the result of the step before; tensor-parallel native ranks stay in lockstep."""
    if plan.off_policy and config.data.sampler.class_path:
        yield error(
            "data.sampler.class_path",
            "a curriculum chooses rows by what came of the step before, but rows are drawn ahead of "
            f"training. Set {ASYNC}.max_policy_age=0 and {OVER_SAMPLING}=1, or do without data.sampler.",
        )
    rollout = config.actor_rollout_ref.rollout
    ranks = rollout.tensor_model_parallel_size
    if ranks > 1 and not holds_weights(rollout) and plan.over_sampling == 1:
        yield error(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            f"{ranks} ranks sample together in the native engine, but with {ASYNC} each is interrupted at a "
            "moment of its own. Set it to 1, or use an engine with weights of its own (vllm, sglang).",
        )


def _weight_sync_interval(config: PpoConfig, plan: AsyncPlan) -> Findings:
    """Validation needs the weights of its step, which the engine has only after a weight sync."""
    every = config.trainer.async_training.trigger_parameter_sync_step
    test_freq = config.trainer.test_freq
    if every > 1 and not plan.concurrent:
        yield warning(
            f"{ASYNC}.trigger_parameter_sync_step", f"{every} has no effect without {ASYNC}.enable=true."
        )
    elif every > 1 and test_freq > 0 and test_freq % every:
        yield error(
            "trainer.test_freq",
            f"{test_freq}: the engine has the weights of a step only every {every} steps "
            f"({ASYNC}.trigger_parameter_sync_step). Set it to {nearest_multiples(test_freq, every)}.",
        )
