"""Weights & Biases. WANDB_MODE=offline keeps everything in the run's folder, for `wandb sync` later.

A resumed run goes on under the same id. What it computes again has steps that are there already: they have the same numbers,
and wandb leaves them out.
"""

from __future__ import annotations

import json
import os
from typing import Any

from strop.extras import require
from strop.run.plain_json import to_json
from strop.run.trackers.identity import id_of
from strop.run.tracking import Metrics, Rows, Run


class WandbTracker:
    def __init__(self, run: Run):
        self.wandb = require("wandb", extra="wandb", why="trainer.logger=wandb")
        settings: dict[str, Any] = {"console": "off"}
        proxy = run.config.get("trainer", {}).get("wandb_proxy")
        if proxy:
            settings |= {"http_proxy": proxy, "https_proxy": proxy}
        run.directory.mkdir(parents=True, exist_ok=True)
        self.run = self.wandb.init(
            project=run.project,
            name=run.experiment,
            entity=os.environ.get("WANDB_ENTITY"),
            config=json.loads(to_json(run.config)),
            id=id_of(run, "wandb"),
            resume="allow",
            dir=str(run.directory),
            settings=self.wandb.Settings(**settings),
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = self.wandb.Table(columns=columns, data=[[_cell(row.get(key)) for key in columns] for row in rows])
        self.run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self.run.finish()


def _cell(value: Any) -> Any:
    """Tables want one type per column."""
    return (
        value
        if isinstance(value, str | float | bool) or value is None
        else float(value)
        if isinstance(value, int)
        else str(value)
    )
