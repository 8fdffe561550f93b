"""Trackio: a database in TRACKIO_DIR or Hugging Face's cache, shown by `trackio show`. TRACKIO_SPACE_ID sends it to a Space.

Trackio knows a run by its name, so a new run under a name that is taken gets a number behind it.
"""

from __future__ import annotations

import json
from typing import Any

from strop.extras import require
from strop.run.plain_json import to_json
from strop.run.trackers.identity import known_id, remember_id
from strop.run.tracking import Metrics, Rows, Run


class TrackioTracker:
    def __init__(self, run: Run):
        self.trackio = require("trackio", extra="trackio", why="trainer.logger=trackio")
        name = known_id(run, "trackio") or self._free(run)
        self.run = self.trackio.init(
            project=run.project,
            name=name,
            config=json.loads(to_json(run.config)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        remember_id(run, "trackio", name)

    def _free(self, run: Run) -> str:
        taken = {known.name for known in _runs(self.trackio, run.project)}
        names = (run.experiment, *(f"{run.experiment}-{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = self.trackio.Table(
            columns=columns, data=[[row.get(key) for key in columns] for row in rows], allow_mixed_types=True
        )
        self.run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self.run.finish()


def _runs(trackio: Any, project: str) -> list[Any]:
    try:
        return list(trackio.Api().runs(project))
    except (ValueError, OSError):  # a project that does not exist yet
        return []
