"""Weights & Biases. WANDB_MODE=offline keeps everything in WANDB_DIR or the run's folder, for `wandb sync`.

A resumed run continues under the same id. The steps that it repeats are there already, with the same numbers,
and wandb ignores them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from strop.extras import require
from strop.run.atomic_files import to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun, columns_of, get_or_create_id


class WandbTracker:
    def __init__(self, run: TrackedRun):
        self.wandb = require("wandb", extra="wandb", why="trainer.logger=wandb")
        settings: dict[str, object] = {"console": "off"}
        trainer = run.config.get("trainer", {})
        proxy = trainer.get("wandb_proxy") if isinstance(trainer, Mapping) else None
        if proxy:
            settings |= {"http_proxy": proxy, "https_proxy": proxy}
        folder = os.environ.get("WANDB_DIR") or str(run.directory)
        os.makedirs(folder, exist_ok=True)
        self.exit_code = 0
        self.run = self.wandb.init(
            project=run.project,
            name=run.experiment,
            entity=os.environ.get("WANDB_ENTITY"),
            config=json.loads(to_json(run.config)),
            id=get_or_create_id(run, "wandb"),
            resume="allow",
            dir=folder,
            settings=self.wandb.Settings(**settings),
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = columns_of(rows)
        table = self.wandb.Table(
            columns=columns,
            data=[[_cell(row.get(key)) for key in columns] for row in rows],
            allow_mixed_types=True,
        )
        self.run.log({"val/generations": table}, step=step)

    def mark_failed(self, reason: str) -> None:
        self.run.summary["error"] = reason
        self.exit_code = 1

    def close(self) -> None:
        self.run.finish(exit_code=self.exit_code)


def _cell(value: object) -> str | float | None:
    """The value of a table cell: a number, a text, or a text of what is neither."""
    if value is None or isinstance(value, str | float | bool):
        return value
    if isinstance(value, int):
        return float(value)
    return str(value)
