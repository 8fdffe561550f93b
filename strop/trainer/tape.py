"""A whole step on the disk: `recorded/step_K` in the run's folder.

    global_step_{K-1}/       a complete checkpoint of the moment before: models, optimizers, random states, place in the data
    trajectories.json        what was sampled and how it was scored
    gen.safetensors ...      what each phase gave, a file per phase in the order of PHASES
    after.safetensors        the weights of every role afterwards
    facts.json               metrics of the step, versions, device

The state before is stored and not referred to: checkpoints are thinned out, and a record is worth little without it.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.backends.base import Backend
from strop.run.layout import RECORDED
from strop.run.tree import split
from strop.types import Batch, Prompt, Trajectory, Turn, pad_columns

PHASES: dict[str, tuple[str, ...]] = {
    "gen": ("tokens", "lengths", "prompt_lengths", "groups", "rollout_log_probs"),
    "reward": ("scores", "baselines", "mask"),
    "old_log_prob": ("old_log_probs", "entropy", "sum_pi_squared"),
    "ref": ("ref_log_probs",),
    "values": ("values",),
    "adv": ("rewards", "rollout_weights", "mask", "advantages", "returns"),
}
"""Which tables of the batch a phase answers for. Updates and weights follow after these."""
UPDATES = ("update_critic", "update_actor")
PADDING = -1

COMPARED = ("actor/", "critic/", "reward/", "response_length/", "training/rollout", "rollout_corr/", "pf_ppo/")
"""Metrics that a replay must give again; seconds and speeds are not among them."""
UNLIKE = ("reward/seconds",)


def folder_of(run: Path, step: int) -> Path:
    return run / RECORDED / f"step_{step}"


def recorded_steps(run: Path) -> list[int]:
    names = (path.name.removeprefix("step_") for path in (run / RECORDED).glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def tables(batch: Batch, phase: str) -> dict[str, Tensor]:
    """What a phase answers for, as far as the batch has it. Token ids are a table with PADDING behind the end."""
    found: dict[str, Tensor] = {}
    for name in PHASES[phase]:
        if name == "tokens":
            found[name] = torch.nn.utils.rnn.pad_sequence(batch.sequences, batch_first=True, padding_value=PADDING)
        elif name == "lengths":
            found[name] = torch.tensor(batch.lengths)
        elif getattr(batch, name) is not None:
            found[name] = getattr(batch, name)
    return found


class Losses:
    """The loss of every token of every update, by role, as the micro-batches come."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def observer(self, role: str) -> Any:
        pieces = self.seen.setdefault(role, [])

        def observe(micro: Batch, per_token: Tensor) -> None:
            assert micro.row_ids is not None
            pieces.append((micro.row_ids.cpu(), per_token.detach().float().cpu()))

        return observe

    def tables(self, role: str) -> dict[str, Tensor]:
        """One [passes, tokens] table, in the order of computing, with the row of the batch beside."""
        pieces = self.seen.get(role, [])
        if not pieces:
            return {}
        width = max(table.shape[1] for _, table in pieces)
        return {
            "batch_rows": torch.cat([rows for rows, _ in pieces]),
            "token_losses": torch.cat([pad_columns(table, width) for _, table in pieces]),
        }


def weights_of(models: Mapping[str, Backend]) -> dict[str, Tensor]:
    """All weights, as `role.name`."""
    return {
        f"{role}.{name}": tensor.detach().cpu().clone()
        for role, model in models.items()
        for name, tensor in split(model.state_dict()["model"], name=role)[1].items()
    }


def compared(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(COMPARED) and name not in UNLIKE}


def surroundings(device: torch.device | str) -> dict[str, str]:
    return {
        "strop": metadata.version("strop"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(device),
        "threads": str(torch.get_num_threads()),
    }


def plain_trajectories(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    if any(t.prompt.images for t in trajectories):
        raise ValueError("trainer.record_steps cannot store prompts with images. Take it out.")
    return [dataclasses.asdict(t) for t in trajectories]


def trajectories_of(rows: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    return [
        Trajectory(
            **{
                **row,
                "prompt": Prompt(**row["prompt"]),
                "turns": [Turn(**turn) for turn in row["turns"]],
                "turn_rewards": {int(place): reward for place, reward in row["turn_rewards"].items()},
            }
        )
        for row in rows
    ]
