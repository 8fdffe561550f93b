"""A whole step on the disk: `recorded/step_K` in the run's folder.

    global_step_{K-1}/       a complete checkpoint from before the step
    trajectories.json        the samples and their scores
    gen.safetensors ...      the results of each phase, one file per phase of PHASES
    after.safetensors        the weights of every role after the step
    facts.json               metrics of the step, versions, device

The record has its own checkpoint, because those of the run may be deleted later.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from strop.backends.base import Backend
from strop.run.checkpoint.layout import RECORDED
from strop.run.checkpoint.tensor_files import split
from strop.types import Batch, Prompt, Trajectory, Turn, pad_columns

PHASES: dict[str, tuple[str, ...]] = {
    "gen": ("tokens", "lengths", "prompt_lengths", "groups", "rollout_log_probs"),
    "reward": ("scores", "baselines", "mask"),
    "old_log_prob": ("old_log_probs", "entropy", "sum_pi_squared"),
    "ref": ("ref_log_probs",),
    "values": ("values",),
    "adv": ("rewards", "rollout_weights", "mask", "advantages", "returns"),
}
"""The tensors of the batch that each phase computes. Updates and weights come after these phases."""
UPDATES = ("update_critic", "update_actor")
PADDING = -1

COMPARED = (
    "actor/",
    "critic/",
    "reward/",
    "response_length/",
    "training/rollout",
    "rollout_corr/",
    "pf_ppo/",
)
"""Metrics that a replay must reproduce; times and throughput are not among them."""
UNLIKE = ("reward/seconds",)
JsonRow: TypeAlias = Mapping[str, Any]


def folder_of(run: Path, step: int) -> Path:
    return run / RECORDED / f"step_{step}"


def recorded_steps(run: Path) -> list[int]:
    names = (path.name.removeprefix("step_") for path in (run / RECORDED).glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def tables(batch: Batch, phase: str) -> dict[str, Tensor]:
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


class Losses:
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

    def tables(self, role: str) -> dict[str, Tensor]:
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


def weights_of(models: Mapping[str, Backend]) -> dict[str, Tensor]:
    """All weights, as `role.name`."""
    weights: dict[str, Tensor] = {}
    for role, model in models.items():
        _, tensors = split(model.state_dict()["model"], name=role)
        for name, tensor in tensors.items():
            weights[f"{role}.{name}"] = tensor.detach().cpu().clone()
    return weights


def compared(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a replay must reproduce."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith(COMPARED) and name not in UNLIKE:
            found[name] = value
    return found


def surroundings(device: torch.device | str) -> dict[str, str]:
    """Versions, machine and device: what can change numbers besides the code."""
    return {
        "strop": metadata.version("strop"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(device),
        "threads": str(torch.get_num_threads()),
    }


def plain_trajectories(trajectories: Sequence[Trajectory]) -> list[JsonRow]:
    """The trajectories as JSON values."""
    if any(t.prompt.images for t in trajectories):
        raise ValueError("trainer.record_steps cannot store prompts with images. Take it out.")
    return [dataclasses.asdict(t) for t in trajectories]


def trajectories_of(rows: Sequence[JsonRow]) -> list[Trajectory]:
    """The trajectories of a record."""
    return [_trajectory_of(row) for row in rows]


def _trajectory_of(row: JsonRow) -> Trajectory:
    fields = dict(row)
    fields["prompt"] = Prompt(**row["prompt"])
    fields["turns"] = [Turn(**turn) for turn in row["turns"]]
    fields["turn_rewards"] = {int(place): reward for place, reward in row["turn_rewards"].items()}
    return Trajectory(**fields)
