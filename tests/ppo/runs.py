"""Runs of the loop in this process, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from strop.config.compose import load
from strop.ppo.build import build_ppo
from strop.replay.recording import trainer_class
from strop.run.checkpoint.store import load as load_checkpoint


def run(overrides: list[str], *more: str) -> dict[int, dict[str, float]]:
    """Train; the metrics of every step."""
    loaded = load("ppo_trainer", [*overrides, *more])
    build_ppo(loaded, trainer_class=trainer_class(loaded.config)).fit()
    return metrics(Path(loaded.config.trainer.default_local_dir))


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], {}).update(row["data"])
    return found


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / f"global_step_{step}")["actor/model"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
