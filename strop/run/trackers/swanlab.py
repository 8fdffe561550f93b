"""SwanLab. SWANLAB_MODE is online where an API key is known, else offline: files in SWANLAB_LOG_DIR or the
run's folder, which `swanlab sync` sends later. The mode local needs `swanlab[dashboard]`."""

from __future__ import annotations

import json
import os

from strop.extras import require
from strop.run.atomic_files import to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun, columns_of, get_or_create_id

ID_LENGTH = 21
"""SwanLab takes ids of this length only."""
MODES = {"cloud": "online"}
"""Older names of modes."""


class SwanlabTracker:
    def __init__(self, run: TrackedRun):
        self.swanlab = require("swanlab", extra="swanlab", why="trainer.logger=swanlab")
        self.failure: str | None = None
        folder = os.environ.get("SWANLAB_LOG_DIR") or str(run.directory / "swanlab")
        os.makedirs(folder, exist_ok=True)
        mode = os.environ.get("SWANLAB_MODE")
        if not mode:
            mode = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
        self.run = self.swanlab.init(
            project=run.project,
            name=run.experiment,
            config=json.loads(to_json(run.config)),
            log_dir=folder,
            mode=MODES.get(mode, mode),
            id=get_or_create_id(run, "swanlab", length=ID_LENGTH),
            resume="allow",
        )

    def log(self, metrics: Metrics, step: int) -> None:
        numbers: dict[str, object] = {}
        texts: dict[str, object] = {}
        for name, value in metrics.items():
            if isinstance(value, str):
                texts[name] = self.swanlab.Text(value)
            else:
                numbers[name] = value
        self.run.log({**numbers, **texts}, step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = columns_of(rows)
        table = self.swanlab.echarts.Table()
        table.add(columns, [[str(row.get(key, "")) for key in columns] for row in rows])
        self.run.log({"val/generations": table}, step=step)

    def mark_failed(self, reason: str) -> None:
        self.failure = reason

    def close(self) -> None:
        if self.failure is None:
            self.run.finish()
        else:
            self.run.finish(state="crashed", error=self.failure)
