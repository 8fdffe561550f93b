"""A tracker for `rl_step.py`, named in `plugins:` and `trainer.logger`: when each step ended by the wall and
the processor."""

from __future__ import annotations

import json
import time
from typing import Any

from strop.catalog import TRACKERS
from strop.run.trackers.base import Metrics, Rows, TrackedRun


@TRACKERS.register("clock")
class ClockTracker:
    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        self.file = (run.directory / "clock.jsonl").open("w")

    def log(self, metrics: Metrics, step: int) -> None:
        line: dict[str, Any] = {
            "wall": time.perf_counter(),
            "processor": time.process_time(),
            "data": dict(metrics),
        }
        self.file.write(json.dumps(line) + "\n")

    def log_generations(self, rows: Rows, step: int) -> None:
        pass

    def close(self) -> None:
        self.file.close()
