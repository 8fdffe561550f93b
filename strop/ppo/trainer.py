"""The training loop of PPO, GRPO, RLOO, ReMax ...: sample, score, estimate, update.

The loop does not depend on the algorithm's name. The catalog declares what an estimator and a loss need, and
that decides which models exist and what a batch contains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from strop.algorithms.kl import KLController
from strop.algorithms.metrics.training import StepRecord, speed_metrics, step_metrics
from strop.backends.base import MicroBatching, Roles
from strop.backends.micro_batches import NonFiniteLoss
from strop.config.arithmetic import Plan
from strop.config.schema.ppo import PpoConfig
from strop.data.balance import balanced_partitions, imbalance_metrics
from strop.data.loader import PromptLoader
from strop.ppo.collect import Collector, Validator
from strop.ppo.critic_update import CriticUpdate
from strop.ppo.episodes.policies import PolicySet, joined
from strop.ppo.episodes.rows import first_rows
from strop.ppo.experience import (
    ExperienceFacts,
    add_advantages,
    add_old_log_probs,
    add_ref_log_probs,
    add_values,
    correct_off_policy,
    distill,
    refuse_nonfinite,
    shape_rewards,
)
from strop.ppo.resampling import resample
from strop.ppo.teacher import add_teacher_log_probs
from strop.ppo.update import ActorUpdate, ExtraLoss, run_updates
from strop.ranks import SharedFailure
from strop.rewards.scorer import BrokenScorer
from strop.run.checkpoint.contents import LoopState
from strop.run.samples import UpdateLogProbs
from strop.shared.dropped_step import (
    drop_validation,
    end_if_stopped,
    resuming_command,
    save_and_log,
    save_before_end,
    save_unvalidated,
    validate_again,
)
from strop.shared.process_setup import long_lived_objects_frozen
from strop.shared.run_output import RunOutput
from strop.stopping import StopRequested, deferred, droppable, requested
from strop.types import Batch, Trajectory, batch_of

log = logging.getLogger(__name__)


@dataclass
class PpoTrainer:
    """Everything that a reinforcement-learning run consists of, and its loop."""

    config: PpoConfig
    plan: Plan
    facts: ExperienceFacts
    roles: Roles
    loader: PromptLoader
    collector: Collector
    validator: Validator | None
    output: RunOutput
    """Checkpoints, trackers and dumps."""
    kl_controller: KLController
    micro: dict[str, MicroBatching]
    """The micro-batches of each pass over a model."""
    actor_objective: ActorUpdate
    critic_objective: CriticUpdate
    sync_weights: Callable[[int], None]
    """Hands the actor's weights to the rollout engine, as a version."""
    total_steps: int
    policies: PolicySet | None = None
    """Players with weights of their own; None: the run has one policy."""
    extra_loss: ExtraLoss | None = None
    """Another loss of the actor, in each update."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """Called after each update of the actor."""
    update_log_probs: UpdateLogProbs | None = None
    """What the update of this step computed on the way, for its samples."""
    step: int = 0

    def fit(self) -> None:
        """Train until the last step."""
        with self.output, closing(self), deferred(), long_lived_objects_frozen():
            self.resume()
            if self.config.trainer.val_only:
                return
            while self.step < self.total_steps:
                self.step += 1
                record = self.output.record(self.step)
                with record.phase("step"):
                    trajectories, batch = self.train_step(record)
                self.report(record, trajectories, batch)
                self.write_samples(record, trajectories, batch)
                state = LoopState.of(self, self.step)
                self.validate_if_due(record, state)
                save_and_log(self.output, self, record)
                end_if_stopped(self.output, self, record, state)

    def resume(self) -> None:
        """Load the latest checkpoint, give the weights to the engine, and validate if asked for."""
        self.step = self.output.resume(self)
        self.sync_weights(self.step)
        if self.output.validation_dropped:
            validate_again(self.output, self)
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            record = self.output.record(self.step)
            self.validate(record)
            if self.validator is not None:
                self.output.log(record, self.step)

    def train_step(self, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        """One step: sample, score, estimate, update."""
        trajectories = self.sample_and_score(record)
        self.output.validation = {}  # that of the weights before this step
        trained = trajectories
        if self.policies is None:
            batch = self.learn(batch_of(trajectories), trajectories, record)
        else:
            trained, batch = self.learn_policies(self.policies, trajectories, record)
        if self.step >= self.config.trainer.critic_warmup:
            with record.phase("update_weights"):
                self.sync_weights(self.step)
        self.loader.update(trajectories)
        return trained, batch

    def learn(self, batch: Batch, trajectories: list[Trajectory], record: StepRecord) -> Batch:
        """From sampled rows to updated weights; returns the batch with its advantages."""
        replays = self.config.actor_rollout_ref.actor.router_replay.mode == "R3"
        if replays and batch.experts is None and bool(batch.mask.any()):
            raise ValueError(
                "router_replay.mode=R3: the rollout engine returned no experts. Set router_replay.mode=R2."
            )
        batch = self.run_models(batch, record)
        try:
            batch = self.estimate(batch, trajectories, record)
            drawn = batch
            if self.config.algorithm.use_pf_ppo:
                drawn = resample(batch, self.config, self.step, record)
            self.update(drawn, record)
        except NonFiniteLoss as problem:
            raise self.output.evidence(problem, batch, self.step, trajectories) from problem
        return batch

    def learn_policies(
        self, policies: PolicySet, trajectories: list[Trajectory], record: StepRecord
    ) -> tuple[list[Trajectory], Batch]:
        """The same for each policy that is trained, on its own rows."""
        shares = policies.shares(trajectories, record)
        for share in shares:
            with policies.learning(share, record):
                share.batch = self.learn(share.batch, share.trajectories, record)
            share.log_probs = self.update_log_probs
        trained, batch, self.update_log_probs = joined(shares)
        return trained, batch

    def sample_and_score(self, record: StepRecord) -> list[Trajectory]:
        """The scored samples of the next prompts."""
        alone = self.output.ranks.world == 1  # several ranks must drop the step together
        with self.drop_unfinished(record), droppable(alone):
            return self.collector.collect(self.loader.draw, self.plan.prompts_per_step, self.step, record)

    @contextmanager
    def drop_unfinished(self, record: StepRecord) -> Iterator[None]:
        """Around sampling and scoring, before anything is updated: if they fail, the state before the step is
        saved (shared/dropped_step.py)."""
        start = LoopState.of(self, self.step - 1)
        try:
            yield
        except StopRequested as stop:
            save_before_end(self.output, self, record, start, stop)
            raise
        except BrokenScorer:
            self.step = start.step
            if self.output.save_if_missing(self, record, start):
                log.error(
                    "Step %d is dropped; the checkpoint of step %d is complete, and %s resumes from it.",
                    *(start.step + 1, start.step, resuming_command(self.output)),
                )
            raise
        except Exception as error:  # raised again, as what a signal has caused if one came
            number = requested()
            if number is None or (self.output.ranks.world > 1 and not isinstance(error, SharedFailure)):
                raise
            # A signal for all processes of a run also ends its helpers: data workers, scorers, engines.
            log.warning("Sampling failed after the signal: %s: %s", type(error).__name__, error)
            caused = StopRequested(number)
            save_before_end(self.output, self, record, start, caused)
            raise caused from error

    def run_models(self, batch: Batch, record: StepRecord) -> Batch:
        """Add old log-probs, reference and teacher log-probs, and values, where they are needed."""
        if self.facts.needs_old_log_probs:
            with record.phase("old_log_prob"):
                micro = self.micro["log_prob"]
                batch = add_old_log_probs(batch, self.roles.actor, self.facts, micro, record)
        if self.roles.reference is not None:
            with record.phase("ref"):
                batch = add_ref_log_probs(batch, self.roles.reference, self.micro["ref"])
        if self.roles.teacher is not None:
            with record.phase("teacher"):
                settings = self.config.algorithm.distillation
                batch = add_teacher_log_probs(batch, self.roles.teacher, settings, self.micro["ref"])
        if self.roles.critic is not None:
            with record.phase("values"):
                batch = add_values(batch, self.roles.critic, self.micro["values"])
        return batch

    def estimate(self, batch: Batch, trajectories: list[Trajectory], record: StepRecord) -> Batch:
        """From scores to advantages."""
        algorithm = self.config.algorithm
        with record.phase("adv"):
            refuse_nonfinite(batch)
            batch = shape_rewards(batch, algorithm, self.facts, trajectories, self.kl_controller, record)
            batch = correct_off_policy(batch, self.facts, record)
            batch = add_advantages(batch, algorithm, self.facts, trajectories)
            return distill(batch, algorithm.distillation, record)

    def update(self, batch: Batch, record: StepRecord) -> None:
        """Update the critic, then the actor."""
        if self.roles.critic is not None:
            with record.phase("update_critic"):
                self.update_critic(batch, record)
        if self.step >= self.config.trainer.critic_warmup:
            with record.phase("update_actor"):
                self.update_actor(batch, record)

    def update_actor(self, batch: Batch, record: StepRecord) -> None:
        """All actor updates of a step."""
        actor = self.config.actor_rollout_ref.actor
        objective = self.actor_objective
        objective.begin_step()
        metrics = run_updates(
            self.roles.actor,
            batch,
            objective,
            actor,
            rows=actor.ppo_mini_batch_size * self.plan.samples_per_prompt,
            micro=self.micro["actor"],
            step=self.step,
            name="actor",
            extra_loss=self.extra_loss,
            after_update=self.after_update,
        )
        record.add(metrics)
        known = objective.known(batch, self.roles.actor.ranks)
        if known is not None:
            record.add(objective.drift(batch, known))
        self.update_log_probs = known
        if actor.use_kl_loss:
            record.add({"actor/kl_coef": actor.kl_loss_coef})

    def update_critic(self, batch: Batch, record: StepRecord) -> None:
        """All critic updates of a step."""
        assert self.roles.critic is not None
        critic = self.config.critic
        metrics = run_updates(
            self.roles.critic,
            batch,
            self.critic_objective,
            critic,
            rows=critic.ppo_mini_batch_size * self.plan.samples_per_prompt,
            micro=self.micro["critic"],
            step=self.step,
            name="critic",
        )
        record.add(metrics)

    def report(self, record: StepRecord, trajectories: list[Trajectory], batch: Batch) -> None:
        """Add the metrics of a step to its record."""
        data = self.config.data
        heads = list(range(len(batch)))
        if batch.episodes is not None:  # an episode counts once
            heads = first_rows(batch.episodes).tolist()
        record.add(
            step_metrics(
                batch.select(heads),
                [trajectories[row] for row in heads],
                max_prompt_length=data.max_prompt_length,
                max_response_length=data.max_response_length,
                has_task_reward=self.facts.has_task_reward,
            )
        )
        record.add(speed_metrics(batch, record.seconds, self.plan.devices))
        if self.config.trainer.balance_batch:
            ranks = min(self.plan.data_parallel, len(batch))  # devices that share a row count once
            record.add(imbalance_metrics(batch.lengths, balanced_partitions(batch.lengths, ranks)))
        record.add(self.collector.engine.stats(), prefix="rollout/")
        record.add({"training/global_step": self.step, "training/epoch": self.loader.epoch})

    def write_samples(self, record: StepRecord, trajectories: list[Trajectory], batch: Batch) -> None:
        """Dump the samples of a step, and keep some for the board."""
        self.output.dump_rollouts(trajectories, self.step, record)
        self.output.keep_samples(trajectories, batch, self.step, record, self.update_log_probs)
        self.update_log_probs = None

    def validate_if_due(self, record: StepRecord, state: LoopState) -> None:
        """Validate every trainer.test_freq steps and after the last one. A signal, or a scorer that fails for
        all samples, ends the validation; the resumed run does it again. `state` is that before it."""
        every = self.config.trainer.test_freq
        if every > 0 and (self.step == self.total_steps or self.step % every == 0):
            try:
                with drop_validation(self.output):
                    self.validate(record)
            except BrokenScorer:
                save_unvalidated(self.output, self, record, state)
                raise

    def validate(self, record: StepRecord) -> None:
        """Sample and score the validation prompts; the metrics go into the record."""
        if self.validator is None:
            return
        alone = self.output.ranks.world == 1
        with record.phase("testing"), droppable(alone):
            samples = self.validator.run(self.step, record)
        self.output.log_validation(samples, record, self.step)

    def close(self) -> None:
        """Close data workers, the scorer and the engine."""
        with closing(self.collector), closing(self.loader):  # the collector also if a loader fails
            if self.validator is not None:
                self.validator.loader.close()
