"""The training loop with a recorder: stores the steps of trainer.record_steps for `strop replay`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from strop.config.schema.ppo import PpoConfig
from strop.ppo.trainer import PpoTrainer
from strop.replay.recording_format import (
    PHASES,
    Losses,
    compared,
    folder_of,
    plain_trajectories,
    surroundings,
    tables,
    weights_of,
)
from strop.run.atomic_files import replace_text, to_json
from strop.run.checkpoint.store import save
from strop.run.checkpoint.tensor_files import write_tensors
from strop.shared.step_record import StepRecord
from strop.types import Batch, Trajectory, batch_of

EVERYTHING = ["model", "optimizer", "extra"]


class Tape(Protocol):
    """Receives the results of every phase, and returns what the next phase works on."""

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]: ...

    def phase(self, name: str, batch: Batch) -> Batch: ...

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None: ...

    def weights(self, weights: dict[str, Tensor]) -> None: ...


@dataclass
class Recorder:
    """Writes the results of every phase into a folder."""

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
class TapedTrainer(PpoTrainer):
    """The training loop; during `taped_step` the results of every phase pass through a tape."""

    tape: Tape | None = None

    def taped_step(self, tape: Tape, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        """One training step with the tape."""
        self.tape = tape
        self.losses = Losses()
        self.actor_objective.observe = self.losses.observer("actor")
        self.critic_objective.observe = self.losses.observer("critic")
        try:
            found = super().train_step(record)
            tape.weights(weights_of(self.output.models))
            return found
        finally:
            self.tape = None
            self.actor_objective.observe = None
            self.critic_objective.observe = None

    def sample_and_score(self, record: StepRecord) -> list[Trajectory]:
        trajectories = super().sample_and_score(record)
        if self.tape is None:
            return trajectories
        return self.tape.sampled(trajectories)

    def run_models(self, batch: Batch, record: StepRecord) -> Batch:
        return self._pass(super().run_models(batch, record), ("old_log_prob", "ref", "values"))

    def estimate(self, batch: Batch, trajectories: list[Trajectory], record: StepRecord) -> Batch:
        return self._pass(super().estimate(batch, trajectories, record), ("adv",))

    def _pass(self, batch: Batch, phases: Sequence[str]) -> Batch:
        for name in phases:
            if self.tape is not None and tables(batch, name):
                batch = self.tape.phase(name, batch)
        return batch

    def update_actor(self, batch: Batch, record: StepRecord) -> None:
        super().update_actor(batch, record)
        self._updated("actor", record)

    def update_critic(self, batch: Batch, record: StepRecord) -> None:
        super().update_critic(batch, record)
        self._updated("critic", record)

    def _updated(self, role: str, record: StepRecord) -> None:
        if self.tape is not None:
            metrics: dict[str, float] = {}
            for name, value in record.metrics.items():
                if name.startswith(f"{role}/"):
                    metrics[name] = value
            self.tape.updated(f"update_{role}", self.losses.tables(role), metrics)


@dataclass
class RecordingTrainer(TapedTrainer):
    """Stores the steps of trainer.record_steps."""

    def train_step(self, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        if self.step not in (self.config.trainer.record_steps or ()):
            return super().train_step(record)
        folder = folder_of(self.output.directory, self.step)
        with record.phase("record_step"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            parts = self.output.state(self, dict.fromkeys(self.output.models, EVERYTHING))
            parts["trainer"]["step"] = self.step - 1
            save(folder, self.step - 1, parts)
        found = self.taped_step(Recorder(folder), record)
        facts = {
            "step": self.step,
            "surroundings": surroundings(next(self.roles.actor.module.parameters()).device),
            "phases": [name for name in PHASES if (folder / f"{name}.safetensors").exists()],
            "metrics": compared(record.metrics),
        }
        # Written last: a record without this file is not complete.
        replace_text(folder / "facts.json", to_json(facts, indent=1))
        return found


def trainer_class(config: PpoConfig) -> type[PpoTrainer]:
    """The trainer that records steps, where trainer.record_steps asks for it."""
    return RecordingTrainer if config.trainer.record_steps else PpoTrainer
