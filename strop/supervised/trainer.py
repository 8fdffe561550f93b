"""The training loop of sft, rm and dpo. They differ by data set and loss, which a `Task` holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.algorithms.metrics.training import StepRecord, throughput_metrics
from strop.backends.base import Backend, MicroBatching
from strop.backends.micro_batches import NonFiniteLoss
from strop.config.arithmetic import SupervisedPlan
from strop.data.loader import Loader
from strop.models.heads import RewardStatistics
from strop.run.checkpoint.contents import LoopState
from strop.shared.dropped_step import (
    drop_validation,
    end_if_stopped,
    raise_if_stopped,
    save_and_log,
    validate_again,
)
from strop.shared.process_setup import long_lived_objects_frozen
from strop.shared.run_output import RunOutput
from strop.stopping import deferred
from strop.supervised.reference import with_reference
from strop.supervised.tasks import Forward, Item, Task, is_trainable
from strop.types import Batch

if TYPE_CHECKING:
    from strop.config.schema.roots import AnySupervisedConfig

MOMENT_DECAY = 0.98
"""Weight of the past in the running moments of the scores: about the last fifty updates."""


@dataclass
class EpochProgress:
    """Tokens and rows seen so far, which are part of a checkpoint, and the time left."""

    tokens: int = 0
    rows: int = 0
    clock: Callable[[], float] = time.monotonic

    def start(self, step: int, total_steps: int) -> None:
        self.first = step
        self.total = total_steps
        self.begun = self.clock()

    def after(self, step: int, *, tokens: int, rows: int) -> dict[str, float]:
        """Metrics after a step that took in `tokens` and `rows`."""
        self.tokens += tokens
        self.rows += rows
        per_step = (self.clock() - self.begun) / (step - self.first)
        return {
            "train/global_tokens": tokens,
            "train/total_tokens": self.tokens,
            "train/total_rows": self.rows,
            "perf/eta_s": per_step * (self.total - step),
        }

    def state_dict(self) -> dict[str, object]:
        return {"tokens": self.tokens, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.tokens = int(state["tokens"])
        self.rows = int(state["rows"])


@dataclass
class ScoreMoments:
    """Mean and standard deviation of all scores of a reward model, which normalize its rewards later.

    Those of a validation are used for the weights that it saw; after an update, running ones of the training
    pairs: scores grow while a reward model learns.
    """

    validation: RewardStatistics | None = None
    """Of the current weights."""
    moments: dict[str, float] = field(default_factory=lambda: {"mean": 0.0, "square": 0.0, "weight": 0.0})

    def __call__(self, found: dict[str, float], validation: bool) -> None:
        """Read the means of a loss, and replace the second moment by the standard deviation."""
        mean = (found["chosen_reward"] + found["rejected_reward"]) / 2
        square = found.pop("score_square")
        found |= {"score_mean": mean, "score_std": _deviation(mean, square)}
        if validation:
            self.validation = _statistics(mean, square)
            return
        self.validation = None
        new = {"mean": mean, "square": square, "weight": 1.0}
        for name, old in self.moments.items():
            self.moments[name] = MOMENT_DECAY * old + (1 - MOMENT_DECAY) * new[name]

    @property
    def statistics(self) -> RewardStatistics:
        weight = self.moments["weight"]
        if self.validation is not None:
            return self.validation
        if not weight:
            return RewardStatistics()
        return _statistics(self.moments["mean"] / weight, self.moments["square"] / weight)

    def state_dict(self) -> dict[str, object]:
        return {"moments": dict(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments = {name: float(value) for name, value in state["moments"].items()}


def _statistics(mean: float, square: float) -> RewardStatistics:
    return RewardStatistics(mean, max(_deviation(mean, square), 1e-8))


def _deviation(mean: float, square: float) -> float:
    return math.sqrt(max(square - mean * mean, 0.0))


Observer = Callable[[dict[str, float], bool], None]
"""Called with the metrics of every update (False) and every validation (True)."""


@dataclass
class SupervisedTrainer:
    """Everything that a supervised run consists of, and its loop."""

    config: AnySupervisedConfig
    plan: SupervisedPlan
    task: Task
    model: Backend
    loader: Loader
    validation: Loader | None
    output: RunOutput
    """Checkpoints, trackers and dumps."""
    micro: MicroBatching
    total_steps: int
    test_freq: int
    """Steps between two validations; the last step is always validated."""
    reference: Forward | None = None
    """Computed in every step. None: there is none, or its log-probs are known."""
    before_loss: Callable[[Batch, Forward, MicroBatching], Batch] | None = None
    """Adds what the loss needs to know of the policy before the update; called with its forward pass."""
    progress: EpochProgress = field(default_factory=EpochProgress)
    observers: Sequence[Observer] = ()
    after_update: Sequence[Callable[[], None]] = ()
    """Called after each update."""
    step: int = 0

    def fit(self) -> None:
        """Train until the last step."""
        with self.output, closing(self), deferred(), long_lived_objects_frozen():
            self.resume()
            if self.config.trainer.val_only:
                return
            self.progress.start(self.step, self.total_steps)
            while self.step < self.total_steps:
                self.step += 1
                record = self.output.record(self.step)
                with record.phase("step"):
                    batch = self.train_step(record)
                self.report(record, batch)
                self.refuse_useless_data()
                state = LoopState.of(self, self.step)
                if self.step == self.total_steps or self.step % self.test_freq == 0:
                    with drop_validation(self.output):
                        self.validate(record)
                save_and_log(self.output, self, record)
                end_if_stopped(self.output, self, record, state)

    def resume(self) -> None:
        """Load the latest checkpoint; validate where the configuration says so."""
        self.step = self.output.resume(self)
        trainer = self.config.trainer
        if self.output.validation_dropped:
            validate_again(self.output, self)
        wanted = trainer.val_only or (self.step == 0 and trainer.val_before_train)
        if wanted and self.validation is not None:
            record = self.output.record(self.step)
            self.validate(record)
            self.output.log(record, self.step)

    def train_step(self, record: StepRecord) -> Batch | None:
        """One update; None when no row of the batch can be trained on."""
        self.output.validation = {}  # that of the weights before this step
        with record.phase("data"):
            batch = self.collect(self.loader.draw(), record)
        if batch is None:
            record.add({"train/empty_updates": 1})
        else:
            try:
                self.update(batch, record)
            except NonFiniteLoss as problem:
                raise self.output.evidence(problem, batch, self.step) from problem
        self.model.advance_schedule()
        return batch

    def refuse_useless_data(self) -> None:
        """ValueError if no row of the first epoch, or of the whole run, could be trained on."""
        if not self.progress.rows and (self.step == self.total_steps or self.loader.epoch > 0):
            raise ValueError(
                f"No row could be trained on in {self.step} steps. All were skipped: they cannot be learned "
                f"from, or nothing is left of them after data.max_length={self.config.data.max_length}. "
                "Set data.max_length higher, or repair data.train_files."
            )

    def collect(self, items: Sequence[Item], record: StepRecord | None = None) -> Batch | None:
        """The trainable rows as a batch; None: there are none. All other rows are counted."""
        usable = [item for item in items if is_trainable(item)]
        if record is not None and len(usable) < len(items):
            record.add({"train/skipped_rows": len(items) - len(usable)})
        if not usable:
            return None
        batch = self.task.batch(usable)
        if self.reference is not None:
            batch = with_reference(batch, self.reference, self.micro)
        if self.before_loss is not None:
            batch = self.before_loss(batch, self.model.forward, self.micro)
        return batch

    def update(self, batch: Batch, record: StepRecord) -> None:
        """One optimizer step."""
        with record.phase("update"):
            wanted = self.task.want(training=True)
            found = self.model.forward_backward(batch, wanted, self.task.loss(batch), self.micro)
            info = self.model.step()
        for call in self.after_update:
            call()
        self._observe(found, validation=False)
        record.add(found, prefix="train/")
        record.add(
            {"train/grad_norm": info.grad_norm, "train/lr": info.lr, "train/skipped_updates": info.skipped}
        )
        if info.loss_scale is not None:
            record.add({"train/loss_scale": info.loss_scale})

    def validate(self, record: StepRecord) -> None:
        """Means over all units of the validation rows; they do not depend on the batch size, unless `compat`
        averages batches."""
        if self.validation is None:
            return
        sums: dict[str, float] = {}
        units = 0.0
        skipped = 0.0
        with record.phase("testing"):
            for items in self.validation:
                raise_if_stopped(self.output)
                batch = self.collect(items)
                skipped += sum(not is_trainable(item) for item in items)
                if batch is None:
                    continue
                outputs = self.model.forward(batch, self.task.want(training=False), self.micro)
                weight = self.task.validation_weight(batch)
                for name, value in self.task.loss(batch)(outputs, batch)[1].items():
                    sums[name] = sums.get(name, 0.0) + float(value) * weight
                units += weight
        found = {name: total / units for name, total in sums.items()}
        if skipped:
            record.add({"val/skipped_rows": skipped})
        if found:
            self._observe(found, validation=True)
            record.add(found, prefix="val/")
            self.output.validation = {f"val/{name}": value for name, value in found.items()}

    def report(self, record: StepRecord, batch: Batch | None) -> None:
        """Add the metrics of a step to its record."""
        lengths = [] if batch is None else batch.lengths
        tokens = sum(lengths)
        seconds = record.seconds["step"]
        rows = len(lengths) // self.task.rows_per_item
        record.add(throughput_metrics(total_tokens=tokens, step_seconds=seconds, devices=self.plan.devices))
        record.add(self.progress.after(self.step, tokens=tokens, rows=rows))
        record.add(record.seconds, prefix="timing_s/")
        record.add({"training/global_step": self.step, "training/epoch": self.loader.epoch})

    def close(self) -> None:
        """Close data workers."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()

    def _observe(self, found: dict[str, float], *, validation: bool) -> None:
        for observer in self.observers:
            observer(found, validation)
