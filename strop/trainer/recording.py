"""The loop with a recorder: the steps of trainer.record_steps are stored whole, for `strop replay`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from strop.run.checkpoint import save
from strop.run.durable import replace_text
from strop.run.plain_json import to_json
from strop.run.tensor_file import write_tensors
from strop.trainer.ppo import PpoTrainer
from strop.trainer.record import StepRecord
from strop.trainer.tape import (
    PHASES,
    Losses,
    compared,
    folder_of,
    plain_trajectories,
    surroundings,
    tables,
    weights_of,
)
from strop.trainer.update import ActorUpdate, CriticUpdate
from strop.types import Batch, Trajectory, batch_of

EVERYTHING = ["model", "optimizer", "extra"]


class Tape(Protocol):
    """Is told what every phase gave, and says what the next one is to be given."""

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]: ...

    def phase(self, name: str, batch: Batch) -> Batch: ...

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None: ...

    def weights(self, weights: dict[str, Tensor]) -> None: ...


@dataclass
class Recorder:
    """Writes down."""

    folder: Path

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        replace_text(self.folder / "trajectories.json", to_json(plain_trajectories(trajectories)))
        batch = batch_of(trajectories)
        for name in ("gen", "reward"):
            self.phase(name, batch)
        return trajectories

    def phase(self, name: str, batch: Batch) -> Batch:
        self._write(name, tables(batch, name))
        return batch

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None:
        self._write(name, losses)
        replace_text(self.folder / f"{name}.json", to_json(compared(metrics)))

    def weights(self, weights: dict[str, Tensor]) -> None:
        self._write("after", weights)

    def _write(self, name: str, found: dict[str, Tensor]) -> None:
        if found:
            write_tensors(self.folder / f"{name}.safetensors", found, {"order": json.dumps(list(found))})


@dataclass
class TapedCollector:
    """A collector whose samples pass a tape."""

    inner: Any
    tape: Tape

    def collect(self, *arguments: Any) -> list[Trajectory]:
        return self.tape.sampled(self.inner.collect(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class TapedTrainer(PpoTrainer):
    """The loop, with everything that passes between its phases led past a tape, where there is one."""

    tape: Tape | None = None

    def taped_step(self, tape: Tape, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        collector, self.tape, self.losses = self.collector, tape, Losses()
        self.collector = TapedCollector(collector, tape)  # type: ignore[assignment]
        try:
            found = super().train_step(record)
            tape.weights(weights_of(self.keeper.models))
            return found
        finally:
            self.collector, self.tape = collector, None

    def ask_models(self, batch: Batch, record: StepRecord) -> Batch:
        return self._pass(super().ask_models(batch, record), ("old_log_prob", "ref", "values"))

    def estimate(self, batch: Batch, trajectories: list[Trajectory], record: StepRecord) -> Batch:
        return self._pass(super().estimate(batch, trajectories, record), ("adv",))

    def _pass(self, batch: Batch, phases: Sequence[str]) -> Batch:
        for name in phases:
            if self.tape is not None and tables(batch, name):
                batch = self.tape.phase(name, batch)
        return batch

    def actor_objective(self) -> ActorUpdate:
        objective = super().actor_objective()
        if self.tape is not None:
            objective.observe = self.losses.observer("actor")
        return objective

    def critic_objective(self) -> CriticUpdate:
        objective = super().critic_objective()
        if self.tape is not None:
            objective.observe = self.losses.observer("critic")
        return objective

    def update_actor(self, batch: Batch, record: StepRecord) -> None:
        super().update_actor(batch, record)
        self._updated("actor", record)

    def update_critic(self, batch: Batch, record: StepRecord) -> None:
        super().update_critic(batch, record)
        self._updated("critic", record)

    def _updated(self, role: str, record: StepRecord) -> None:
        if self.tape is not None:
            own = {name: value for name, value in record.metrics.items() if name.startswith(f"{role}/")}
            self.tape.updated(f"update_{role}", self.losses.tables(role), own)


@dataclass
class RecordingTrainer(TapedTrainer):
    """Stores the steps of trainer.record_steps."""

    def train_step(self, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        if self.step not in self.config.trainer.record_steps:
            return super().train_step(record)
        folder = folder_of(self.keeper.directory, self.step)
        with record.phase("record_step"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            parts = self.keeper.state(self, dict.fromkeys(self.keeper.models, EVERYTHING))
            parts["trainer"]["step"] = self.step - 1
            save(folder, self.step - 1, parts)
        found = self.taped_step(Recorder(folder), record)
        facts = {
            "step": self.step,
            "surroundings": surroundings(next(self.roles.actor.module.parameters()).device),
            "phases": [name for name in PHASES if (folder / f"{name}.safetensors").exists()],
            "metrics": compared(record.metrics),
        }
        replace_text(folder / "facts.json", to_json(facts, indent=1))  # last: a record without it is not whole
        return found
