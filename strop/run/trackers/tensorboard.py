"""TensorBoard event files, in TENSORBOARD_DIR or the run's folder. After resuming, later steps of the killed
run are hidden."""

from __future__ import annotations

import os
from pathlib import Path

from strop.extras import require
from strop.run.atomic_files import to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun


class TensorboardTracker:
    def __init__(self, run: TrackedRun):
        require("tensorboard", extra="tensorboard", why="trainer.logger=tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(os.environ.get("TENSORBOARD_DIR") or run.directory / "tensorboard")
        purge = None if run.resumed_from is None else run.resumed_from + 1
        self.writer = SummaryWriter(str(folder), purge_step=purge)
        self.writer.add_text("config", _as_code(to_json(run.config, indent=1)), run.resumed_from or 0)

    def log(self, metrics: Metrics, step: int) -> None:
        for key, value in metrics.items():
            if isinstance(value, str):
                self.writer.add_text(key, value, step)
            else:
                self.writer.add_scalar(key, value, step)

    def log_generations(self, rows: Rows, step: int) -> None:
        for i, row in enumerate(rows):
            text = "\n\n".join(f"**{key}**\n\n{_as_code(str(value))}" for key, value in row.items())
            self.writer.add_text(f"val/generations/{i}", text, step)

    def close(self) -> None:
        self.writer.close()


def _as_code(text: str) -> str:
    """Text that TensorBoard's markdown leaves alone."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
