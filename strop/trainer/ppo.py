"""The loop. PPO, GRPO, RLOO, ReMax ...: facts of the registry decide which roles exist; no algorithm is named here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from strop.algorithms.kl import KLController
from strop.backends.base import Backend, MicroBatching
from strop.backends.nonfinite import NonFiniteLoss
from strop.config.arithmetic import Plan
from strop.config.objective import needs_old_log_probs
from strop.data.loader import Loader
from strop.trainer.collect import Collector
from strop.trainer.experience import (
    add_advantages,
    add_old_log_probs,
    add_ref_log_probs,
    add_values,
    correct,
    refuse_nonfinite,
    resample,
    shape_rewards,
)
from strop.trainer.keeper import Keeper
from strop.trainer.record import StepRecord
from strop.trainer.report import describe, speed
from strop.trainer.update import ActorUpdate, Beside, CriticUpdate, update
from strop.trainer.validate import Validator
from strop.types import Batch, Trajectory, batch_of


@dataclass
class Roles:
    """The models of a run; what a configuration does not need is None."""

    actor: Backend
    critic: Backend | None = None
    reference: Backend | None = None


@dataclass
class PpoTrainer:
    config: Any
    plan: Plan
    roles: Roles
    loader: Loader
    collector: Collector
    validator: Validator | None
    keeper: Keeper
    """Checkpoints, trackers and dumps."""
    kl_controller: KLController
    micro: dict[str, MicroBatching]
    publish: Callable[[int], None]
    """Hand the actor's weights to the engine, as a version."""
    step: int = 0
    total_steps: int = 0
    beside: Beside | None = None
    """What else the actor learns in each update."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """What else follows each update of the actor, such as averaging its weights."""

    def fit(self) -> None:
        """Train until the last step."""
        with self.keeper, closing(self):
            self.step = self.keeper.resume(self)
            self.publish(self.step)
            if self.config.trainer.val_only or (self.step == 0 and self.config.trainer.val_before_train):
                self.validate()
            if self.config.trainer.val_only:
                return
            while self.step < self.total_steps:
                self.step += 1
                record = self.keeper.record(self.step)
                with record.phase("step"):
                    trajectories, batch = self.train_step(record)
                self.report(record, trajectories, batch)
                last = self.step == self.total_steps
                every = self.config.trainer.test_freq
                if every > 0 and (last or self.step % every == 0):
                    self.validate(record)
                try:
                    if self.keeper.save_due(self.step, last, record):
                        self.keeper.save(self, record)
                finally:  # what was measured is kept even when the disk is full
                    self.keeper.log(record, self.step)

    def train_step(self, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        """One step: sample, score, estimate, learn."""
        trajectories = self.collector.collect(self.loader.draw, self.plan.prompts_per_step, self.step, record)
        batch = self.ask_models(batch_of(trajectories), record)
        try:
            batch = self.estimate(batch, trajectories, record)
            self.learn(resample(batch, self.config, self.step, record), record)
        except NonFiniteLoss as problem:
            raise self.keeper.evidence(problem, batch, self.step, trajectories) from problem
        self.loader.update(trajectories)
        return trajectories, batch

    def ask_models(self, batch: Batch, record: StepRecord) -> Batch:
        """What the estimator and the losses need to know from the models."""
        config, roles = self.config, self.roles
        if needs_old_log_probs(config, self.plan.on_policy):
            with record.phase("old_log_prob"):
                batch = add_old_log_probs(batch, roles.actor, config, self.micro["log_prob"], record)
        if roles.reference is not None:
            with record.phase("ref"):
                batch = add_ref_log_probs(batch, roles.reference, self.micro["ref"])
        if roles.critic is not None:
            with record.phase("values"):
                batch = add_values(batch, roles.critic, self.micro["values"])
        return batch

    def estimate(self, batch: Batch, trajectories: list[Trajectory], record: StepRecord) -> Batch:
        """From scores to advantages."""
        config = self.config
        with record.phase("adv"):
            refuse_nonfinite(batch)
            batch = shape_rewards(batch, config, self.kl_controller, record)
            batch = correct(batch, config, record)
            return add_advantages(batch, config, trajectories)

    def learn(self, batch: Batch, record: StepRecord) -> None:
        """Update the critic, then the actor, and hand its weights to the engine."""
        if self.roles.critic is not None:
            with record.phase("update_critic"):
                self.update_critic(batch, record)
        if self.step >= self.config.trainer.critic_warmup:
            with record.phase("update_actor"):
                self.update_actor(batch, record)
            with record.phase("update_weights"):
                self.publish(self.step)

    def update_actor(self, batch: Batch, record: StepRecord) -> None:
        actor = self.config.actor_rollout_ref.actor
        objective = self.actor_objective()
        rows = actor.ppo_mini_batch_size * self.plan.samples_per_prompt
        micro = self.micro["actor"]
        record.add(
            update(self.roles.actor, batch, objective, actor, rows, micro, self.step, "actor", self.beside, self.after_update)
        )
        known = objective.known(batch, self.roles.actor.ranks)
        if known is not None:
            record.add(objective.drift(batch, known))
        self.keeper.remember(known)
        if actor.use_kl_loss:
            record.add({"actor/kl_coef": actor.kl_loss_coef})

    def update_critic(self, batch: Batch, record: StepRecord) -> None:
        assert self.roles.critic is not None
        critic = self.config.critic
        rows = critic.ppo_mini_batch_size * self.plan.samples_per_prompt
        objective = self.critic_objective()
        record.add(update(self.roles.critic, batch, objective, critic, rows, self.micro["critic"], self.step, "critic"))

    def actor_objective(self) -> ActorUpdate:
        return ActorUpdate(self.config, self.width)

    def critic_objective(self) -> CriticUpdate:
        return CriticUpdate(self.config, self.width)

    @property
    def width(self) -> int:
        return self.config.actor_rollout_ref.actor.loss_scale_factor or self.config.data.max_response_length

    def validate(self, record: StepRecord | None = None) -> None:
        if self.validator is None:
            return
        own = record or self.keeper.record(self.step)
        with own.phase("testing"):
            samples = self.validator.run(self.step, own)
        self.keeper.log_validation(samples, own, self.step)
        if record is None:
            self.keeper.log(own, self.step)

    def report(self, record: StepRecord, trajectories: list[Trajectory], batch: Batch) -> None:
        """The numbers of a step."""
        record.add(describe(batch, trajectories, self.config))
        record.add(speed(batch, record, self.plan.devices, balance=self.config.trainer.balance_batch))
        record.add(self.collector.engine.stats(), prefix="rollout/")
        record.add({"training/global_step": self.step, "training/epoch": self.loader.epoch})
        self.keeper.dump_rollouts(trajectories, self.step, record)
        self.keeper.keep_samples(trajectories, batch, self.step, record)

    def close(self) -> None:
        """End worker processes and the engine."""
        self.loader.close()
        if self.validator is not None:
            self.validator.loader.close()
        self.collector.close()
