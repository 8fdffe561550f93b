"""Records the steps of trainer.record_steps for `strop replay`: `recorded/step_K` in the run's folder.

    global_step_{K-1}/       a complete checkpoint from before the step
    trajectories.json        the samples and their scores
    gen.safetensors ...      the results of each phase, one file per phase of PHASES
    after.safetensors        the weights of every role after the step
    facts.json               metrics of the step, versions, device

The record has its own checkpoint, because those of the run may be deleted later.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.metrics.training import StepRecord
from strop.config.schema.ppo import PpoConfig
from strop.ppo.trainer import PpoTrainer
from strop.run.atomic_files import replace_text, to_json
from strop.run.checkpoint.contents import Stateful
from strop.run.checkpoint.layout import RECORDED
from strop.run.checkpoint.store import save
from strop.run.checkpoint.tensor_files import split, write_tensors
from strop.types import Batch, Prompt, Trajectory, Turn, batch_of, pad_columns

ALL_CONTENTS = ["model", "optimizer", "extra"]
PHASES: dict[str, tuple[str, ...]] = {
    "gen": ("tokens", "lengths", "prompt_lengths", "groups", "rollout_log_probs"),
    "reward": ("scores", "baselines", "mask"),
    "old_log_prob": ("old_log_probs", "entropy", "sum_pi_squared"),
    "ref": ("ref_log_probs",),
    "teacher": ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"),
    "values": ("values",),
    "adv": ("rewards", "rollout_weights", "mask", "advantages", "returns"),
}
"""The tensors of the batch that each phase computes. Updates and weights come after these phases."""
UPDATES = ("update_critic", "update_actor")
PADDING = -1
REPRODUCIBLE_METRICS = (
    "actor/",
    "critic/",
    "reward/",
    "response_length/",
    "training/rollout",
    "rollout_corr/",
    "pf_ppo/",
    "distillation/",
)
"""Metrics that a replay must reproduce; times and throughput are not among them."""
TIMED_METRICS = ("reward/seconds",)
"""Metrics below those prefixes that measure time."""
JsonRow: TypeAlias = Mapping[str, Any]


def record_folder(run: Path, step: int) -> Path:
    return run / RECORDED / f"step_{step}"


def recorded_steps(run: Path) -> list[int]:
    steps: list[int] = []
    for path in (run / RECORDED).glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            steps.append(int(number))
    return sorted(steps)


def phase_tensors(batch: Batch, phase: str) -> dict[str, Tensor]:
    """The tensors of a phase that the batch has. Token ids are padded on the right with PADDING."""
    found: dict[str, Tensor] = {}
    for name in PHASES[phase]:
        if name == "tokens":
            found[name] = torch.nn.utils.rnn.pad_sequence(
                batch.sequences, batch_first=True, padding_value=PADDING
            )
        elif name == "lengths":
            found[name] = torch.tensor(batch.lengths)
        elif getattr(batch, name) is not None:
            found[name] = getattr(batch, name)
    return found


class TokenLosses:
    """The loss of every token of every update, by role, as the micro-batches come."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def observer(self, role: str) -> Callable[[Batch, Tensor], None]:
        """A callback that collects the per-token losses of a role."""
        pieces = self.seen.setdefault(role, [])

        def observe(micro: Batch, per_token: Tensor) -> None:
            assert micro.row_ids is not None
            pieces.append((micro.row_ids.cpu(), per_token.detach().float().cpu()))

        return observe

    def tensors(self, role: str) -> dict[str, Tensor]:
        """A [passes, tokens] tensor in the order of computation, and the batch row of each pass."""
        pieces = self.seen.get(role, [])
        if not pieces:
            return {}
        width = max(table.shape[1] for _, table in pieces)
        rows: list[Tensor] = []
        losses: list[Tensor] = []
        for row_ids, table in pieces:
            rows.append(row_ids)
            losses.append(pad_columns(table, width))
        return {"batch_rows": torch.cat(rows), "token_losses": torch.cat(losses)}


def weights_of(models: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """All weights, as `role.name`."""
    weights: dict[str, Tensor] = {}
    for role, model in models.items():
        _, tensors = split(model.state_dict()["model"], name=role)
        for name, tensor in tensors.items():
            weights[f"{role}.{name}"] = tensor.detach().cpu().clone()
    return weights


def reproducible_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a replay must reproduce."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith(REPRODUCIBLE_METRICS) and name not in TIMED_METRICS:
            found[name] = value
    return found


def environment_facts(device: torch.device | str) -> dict[str, str]:
    """Versions, machine and device. They can change numbers although the code is the same."""
    return {
        "strop": metadata.version("strop"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(device),
        "threads": str(torch.get_num_threads()),
    }


def trajectories_as_json(trajectories: Sequence[Trajectory]) -> list[JsonRow]:
    """The trajectories as JSON values."""
    rows: list[JsonRow] = []
    for trajectory in trajectories:
        if trajectory.prompt.images:
            raise ValueError("trainer.record_steps cannot store prompts with images. Take it out.")
        # The scores are recorded; columns may hold what JSON does not.
        scored = dataclasses.replace(trajectory.prompt, columns={})
        row = dataclasses.asdict(dataclasses.replace(trajectory, prompt=scored))
        if trajectory.experts is not None:
            row["experts"] = trajectory.experts.tolist()
        rows.append(row)
    return rows


def trajectories_of(rows: Sequence[JsonRow]) -> list[Trajectory]:
    """The trajectories of a record."""
    return [_trajectory_of(row) for row in rows]


def _trajectory_of(row: JsonRow) -> Trajectory:
    fields = dict(row)
    fields["prompt"] = Prompt(**row["prompt"])
    fields["turns"] = [Turn(**turn) for turn in row["turns"]]
    fields["turn_rewards"] = {int(place): reward for place, reward in row["turn_rewards"].items()}
    if row.get("experts") is not None:
        fields["experts"] = np.array(row["experts"], np.int16)
    return Trajectory(**fields)


class StepHooks(Protocol):
    """Called with the results of every phase; returns what the next phase works on."""

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]: ...

    def phase(self, name: str, batch: Batch) -> Batch: ...

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None: ...

    def weights(self, weights: dict[str, Tensor]) -> None: ...


@dataclass
class Recorder:
    """Writes the results of every phase into a folder."""

    folder: Path

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        replace_text(self.folder / "trajectories.json", to_json(trajectories_as_json(trajectories)))
        batch = batch_of(trajectories)
        for name in ("gen", "reward"):
            self.phase(name, batch)
        return trajectories

    def phase(self, name: str, batch: Batch) -> Batch:
        self._write(name, phase_tensors(batch, name))
        return batch

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None:
        self._write(name, losses)
        replace_text(self.folder / f"{name}.json", to_json(reproducible_metrics(metrics)))

    def weights(self, weights: dict[str, Tensor]) -> None:
        self._write("after", weights)

    def _write(self, name: str, found: dict[str, Tensor]) -> None:
        if found:
            write_tensors(self.folder / f"{name}.safetensors", found, {"order": json.dumps(list(found))})


@dataclass
class HookedTrainer(PpoTrainer):
    """The training loop; during `train_step_with_hooks` the results of every phase pass through hooks."""

    hooks: StepHooks | None = None

    def train_step_with_hooks(self, hooks: StepHooks, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        """One training step with the hooks."""
        self.hooks = hooks
        self.losses = TokenLosses()
        self.actor_objective.observe = self.losses.observer("actor")
        self.critic_objective.observe = self.losses.observer("critic")
        try:
            found = super().train_step(record)
            hooks.weights(weights_of(self.output.models))
            return found
        finally:
            self.hooks = None
            self.actor_objective.observe = None
            self.critic_objective.observe = None

    def sample_and_score(self, record: StepRecord) -> list[Trajectory]:
        trajectories = super().sample_and_score(record)
        if self.hooks is None:
            return trajectories
        return self.hooks.sampled(trajectories)

    def run_models(self, batch: Batch, record: StepRecord) -> Batch:
        phases = ("old_log_prob", "ref", "teacher", "values")
        return self._report_phases(super().run_models(batch, record), phases)

    def estimate(self, batch: Batch, trajectories: list[Trajectory], record: StepRecord) -> Batch:
        return self._report_phases(super().estimate(batch, trajectories, record), ("adv",))

    def _report_phases(self, batch: Batch, phases: Sequence[str]) -> Batch:
        for name in phases:
            if self.hooks is not None and phase_tensors(batch, name):
                batch = self.hooks.phase(name, batch)
        return batch

    def update_actor(self, batch: Batch, record: StepRecord) -> None:
        super().update_actor(batch, record)
        self._updated("actor", record)

    def update_critic(self, batch: Batch, record: StepRecord) -> None:
        super().update_critic(batch, record)
        self._updated("critic", record)

    def _updated(self, role: str, record: StepRecord) -> None:
        if self.hooks is not None:
            metrics: dict[str, float] = {}
            for name, value in record.metrics.items():
                if name.startswith(f"{role}/"):
                    metrics[name] = value
            self.hooks.updated(f"update_{role}", self.losses.tensors(role), metrics)


@dataclass
class RecordingTrainer(HookedTrainer):
    """Stores the steps of trainer.record_steps."""

    def train_step(self, record: StepRecord) -> tuple[list[Trajectory], Batch]:
        if self.step not in (self.config.trainer.record_steps or ()):
            return super().train_step(record)
        folder = record_folder(self.output.directory, self.step)
        with record.phase("record_step"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            parts = self.output.state(self, dict.fromkeys(self.output.models, ALL_CONTENTS))
            parts["trainer"]["step"] = self.step - 1
            save(folder, self.step - 1, parts)
        found = self.train_step_with_hooks(Recorder(folder), record)
        facts = {
            "step": self.step,
            "environment": environment_facts(next(self.roles.actor.module.parameters()).device),
            "phases": [name for name in PHASES if (folder / f"{name}.safetensors").exists()],
            "metrics": reproducible_metrics(record.metrics),
        }
        # Written last: a record without this file is not complete.
        replace_text(folder / "facts.json", to_json(facts, indent=1))
        return found


def trainer_class(config: PpoConfig) -> type[PpoTrainer]:
    """The trainer that records steps, where trainer.record_steps asks for it."""
    return RecordingTrainer if config.trainer.record_steps else PpoTrainer
