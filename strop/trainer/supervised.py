"""The loop of supervised fine-tuning, reward models and DPO. They differ by data set and loss, which a `Task` holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from strop.algorithms.metrics.timing import throughput_metrics
from strop.backends.base import Backend, MicroBatching
from strop.backends.nonfinite import NonFiniteLoss
from strop.config.arithmetic import SupervisedPlan
from strop.data.loader import Loader
from strop.trainer.keeper import Keeper
from strop.trainer.record import StepRecord
from strop.trainer.supervised_batches import teaches
from strop.trainer.supervised_progress import Progress
from strop.trainer.supervised_reference import Forward, with_reference
from strop.trainer.supervised_tasks import Task
from strop.types import Batch

Observer = Callable[[dict[str, float], bool], None]
"""Told what every update (False) and every validation (True) found."""


@dataclass
class SupervisedTrainer:
    config: Any
    plan: SupervisedPlan
    task: Task
    model: Backend
    loader: Loader
    validation: Loader | None
    keeper: Keeper
    micro: MicroBatching
    total_steps: int
    test_freq: int
    """Steps between two validations; the end of a run is always validated."""
    reference: Forward | None = None
    """Asked in every step; None: there is none, or its answers are known."""
    progress: Progress = field(default_factory=Progress)
    observers: Sequence[Observer] = ()
    after_update: Sequence[Callable[[], None]] = ()
    """What else follows each update, such as averaging the weights."""
    step: int = 0

    def fit(self) -> None:
        """Train until the last step."""
        trainer = self.config.trainer
        with self.keeper, closing(self):
            self.step = self.keeper.resume(self)
            if self.validation is not None and (trainer.val_only or (self.step == 0 and trainer.val_before_train)):
                record = self.keeper.record(self.step)
                self.validate(record)
                self.keeper.log(record, self.step)
            if trainer.val_only:
                return
            self.progress.start(self.step, self.total_steps)
            while self.step < self.total_steps:
                self.step += 1
                record = self.keeper.record(self.step)
                with record.phase("step"):
                    batch = self.train_step(record)
                self.report(record, batch)
                last = self.step == self.total_steps
                if self.validation is not None and (last or self.step % self.test_freq == 0):
                    self.validate(record)
                try:
                    if self.keeper.save_due(self.step, last, record):
                        self.keeper.save(self, record)
                finally:  # what was measured is kept even when the disk is full
                    self.keeper.log(record, self.step)

    def train_step(self, record: StepRecord) -> Batch | None:
        """One update; None when no row of the batch teaches anything."""
        with record.phase("data"):
            batch = self.collect(self.loader.draw(), record)
        if batch is None:
            record.add({"train/empty_updates": 1})
        else:
            try:
                self.learn(batch, record)
            except NonFiniteLoss as problem:
                raise self.keeper.evidence(problem, batch, self.step) from problem
        self.model.advance_schedule()
        return batch

    def collect(self, items: Sequence[Any], record: StepRecord | None = None) -> Batch | None:
        """The rows that teach something, as a batch; the others are counted."""
        usable = [item for item in items if teaches(item)]
        if record is not None and len(usable) < len(items):
            record.add({"train/skipped_rows": len(items) - len(usable)})
        if not usable:
            return None
        batch = self.task.batch(usable)
        return batch if self.reference is None else with_reference(batch, self.reference, self.micro)

    def learn(self, batch: Batch, record: StepRecord) -> None:
        with record.phase("update"):
            found = self.model.forward_backward(batch, self.task.want(training=True), self.task.loss(batch), self.micro)
            info = self.model.step()
        for follow in self.after_update:
            follow()
        self._tell(found, validation=False)
        record.add(found, prefix="train/")
        record.add({"train/grad_norm": info.grad_norm, "train/lr": info.lr, "train/skipped_updates": info.skipped})
        if info.loss_scale is not None:
            record.add({"train/loss_scale": info.loss_scale})

    def validate(self, record: StepRecord) -> None:
        """Means over all units of the validation rows, whatever the batches."""
        assert self.validation is not None
        sums: dict[str, float] = {}
        units = skipped = 0.0
        with record.phase("testing"):
            for items in self.validation:
                batch = self.collect(items)
                skipped += sum(not teaches(item) for item in items)
                if batch is None:
                    continue
                outputs = self.model.forward(batch, self.task.want(training=False), self.micro)
                weight = self.task.units(batch)
                for name, value in self.task.loss(batch)(outputs, batch)[1].items():
                    sums[name] = sums.get(name, 0.0) + float(value) * weight
                units += weight
        found = {name: total / units for name, total in sums.items()}
        if skipped:
            record.add({"val/skipped_rows": skipped})
        if found:
            self._tell(found, validation=True)
            record.add(found, prefix="val/")
            self.keeper.validation = {f"val/{name}": value for name, value in found.items()}

    def report(self, record: StepRecord, batch: Batch | None) -> None:
        """The numbers of a step."""
        lengths = [0] if batch is None else batch.lengths
        record.add(
            throughput_metrics(total_tokens=sum(lengths), step_seconds=record.seconds["step"], devices=self.plan.devices)
        )
        record.add(self.progress.after(self.step, tokens=sum(lengths), rows=len(lengths) // self.task.rows_per_item))
        record.add({f"timing_s/{name}": seconds for name, seconds in record.seconds.items()})
        record.add({"training/global_step": self.step, "training/epoch": self.loader.epoch})

    def close(self) -> None:
        """End worker processes."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()

    def _tell(self, found: dict[str, float], *, validation: bool) -> None:
        for observer in self.observers:
            observer(found, validation)
