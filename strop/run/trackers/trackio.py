"""Trackio: a database in TRACKIO_DIR or Hugging Face's cache, shown by `trackio show`. TRACKIO_SPACE_ID sends
it to a Space.

Trackio knows a run by its name, so a new run under a name that is taken gets a number behind it.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Protocol

from strop.extras import require
from strop.run.atomic_files import to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun, columns_of, save_id, saved_id


class _NamedRun(Protocol):
    name: str


class TrackioTracker:
    def __init__(self, run: TrackedRun):
        self.trackio = require("trackio", extra="trackio", why="trainer.logger=trackio")
        name = saved_id(run, "trackio") or self._free_name(run)
        self.run = self.trackio.init(
            project=run.project,
            name=name,
            config=json.loads(to_json(run.config)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        save_id(run, "trackio", name)

    def _free_name(self, run: TrackedRun) -> str:
        taken = {known.name for known in _runs(self.trackio, run.project)}
        name = run.experiment
        number = 2
        while name in taken:
            name = f"{run.experiment}-{number}"
            number += 1
        return name

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = columns_of(rows)
        table = self.trackio.Table(
            columns=columns, data=[[row.get(key) for key in columns] for row in rows], allow_mixed_types=True
        )
        self.run.log({"val/generations": table}, step=step)

    def mark_failed(self, reason: str) -> None:
        """Trackio's runs have no state, so the failure is an alert of the level error."""
        self.run.alert("The run failed", text=reason, level=self.trackio.AlertLevel.ERROR)

    def close(self) -> None:
        self.run.finish()


def _runs(trackio: ModuleType, project: str) -> list[_NamedRun]:
    try:
        return list(trackio.Api().runs(project))
    except (ValueError, OSError):  # a project that does not exist yet
        return []
