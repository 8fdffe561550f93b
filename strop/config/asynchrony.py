"""How far sampling runs ahead of training, and how the loss makes up for it: what a configuration amounts to."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ahead:
    """The keys of trainer.async_training in one unit."""

    beside: bool
    """Sampling goes on while the models learn, from a copy of the weights."""
    cut: bool
    """A weight update interrupts answers; they go on under the new weights."""
    age: float
    """Weight updates of the engine that an answer may be old when it is trained on."""
    sync_steps: int
    """Training steps from one weight update to the next."""
    between_updates: int
    """Prompts that may be begun from one weight update to the next. 0: each when its step asks for it."""

    @property
    def off_policy(self) -> bool:
        """Whether a step may see answers of older weights."""
        return self.between_updates > 0


def ahead_of(config: Any) -> Ahead:
    settings = config.trainer.async_training
    beside, cut = settings.enable, settings.partial_rollout
    if not (beside or cut):
        return Ahead(False, False, 0, 1, 0)
    age = settings.max_policy_age if settings.staleness_threshold is None else settings.staleness_threshold
    steps = settings.trigger_parameter_sync_step if beside else 1
    between = math.floor((1 + age) * steps * config.data.train_batch_size) if age or steps > 1 else 0
    return Ahead(beside, cut, age, steps, between)


def whole_step(leaves: dict[str, Any]) -> list[str]:
    """verl's asynchronous files have data.train_batch_size=0: a step is then `require_batches` mini-batches. Fills that into
    `leaves`, which the user set, and says so."""
    path, mini = "trainer.async_training.", leaves.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    if leaves.get("data.train_batch_size") != 0 or not isinstance(mini, int) or not any(key.startswith(path) for key in leaves):
        return []
    batches = leaves.get(f"{path}require_batches") or 1
    leaves["data.train_batch_size"] = batches * mini
    return [f"data.train_batch_size=0 is now {batches * mini}: {batches} mini-batches (require_batches) of {mini} prompts."]


def in_words(config: Any) -> tuple[str, str] | None:
    """(how far ahead, what that means) for people; None: a step samples what it trains on."""
    ahead = ahead_of(config)
    if not ahead.off_policy:
        return None
    where = "beside training" if ahead.beside else "between steps"
    interrupted = "interrupted by a weight update" if ahead.cut else "waited for at a weight update"
    every = "every step" if ahead.sync_steps == 1 else f"every {ahead.sync_steps} steps"
    weights = correction_of(config).rollout_is
    remedy = f"rollout_is={weights}" if weights else "the engine's log-probs" if old_from_engine(config) else "no correction"
    return (
        f"{where}, at most {ahead.age:g} weight update{'' if ahead.age == 1 else 's'} old",
        f"{ahead.between_updates} prompts from one weight update ({every}) to the next, {interrupted}; {remedy}",
    )


def correction_of(config: Any) -> Any:
    """algorithm.rollout_correction, where sampling runs ahead with importance weights in place of nothing."""
    chosen = config.algorithm.rollout_correction
    if _uncorrected(config) and config.trainer.async_training.compute_prox_log_prob:
        return dataclasses.replace(chosen, rollout_is="token")
    return chosen


def old_from_engine(config: Any) -> bool:
    """Whether the log-probs that clipping compares with are those of the engine."""
    if config.algorithm.rollout_correction.bypass_mode or config.actor_rollout_ref.actor.use_rollout_log_probs:
        return True
    return _uncorrected(config) and not config.trainer.async_training.compute_prox_log_prob


def _uncorrected(config: Any) -> bool:
    """Answers may be of older weights, and nobody said what to do about it."""
    chosen = config.algorithm.rollout_correction
    if chosen.rollout_is or chosen.rollout_rs or chosen.bypass_mode or config.actor_rollout_ref.actor.use_rollout_log_probs:
        return False
    return config.trainer.async_training.use_rollout_log_probs and ahead_of(config).off_policy
