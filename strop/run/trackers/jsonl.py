"""The `file` tracker: metrics.jsonl in the run's folder, one line {"step", "time", "data"} per call, written
at once.

A resumed run removes the lines after the step that it resumes from, then appends. A new run in the same
folder renames an older file to metrics.1.jsonl.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from strop.run.atomic_files import flush_file, replace_text, to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun


class JsonlTracker:
    def __init__(self, run: TrackedRun, *, path: Path | None = None, clock: Callable[[], float] = time.time):
        self.path = path or default_path(run)
        self.samples = self.path.with_suffix(".generations.jsonl")
        self.clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path.with_suffix(".config.json"), to_json(run.config, indent=1))
        for file in (self.path, self.samples):
            begin(file, run.resumed_from)
        # A path that is not writable must fail now, not at the first step.
        self.path.open("a").close()

    def log(self, metrics: Metrics, step: int) -> None:
        append(self.path, {"step": step, "time": self.clock(), "data": metrics})

    def log_generations(self, rows: Rows, step: int) -> None:
        append(self.samples, {"step": step, "time": self.clock(), "rows": list(rows)})

    def close(self) -> None:
        for file in (self.path, self.samples):
            if file.exists():
                flush_file(file)


def default_path(run: TrackedRun) -> Path:
    """metrics.jsonl in the run's folder, or the path in the environment variables of verl's file logger."""
    if named := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(named)
    if root := os.environ.get("VERL_FILE_LOGGER_ROOT"):
        return Path(root) / run.project / f"{run.experiment}.jsonl"
    return run.directory / "metrics.jsonl"


def set_aside(path: Path) -> None:
    """Give an existing file the next free number: metrics.jsonl becomes metrics.1.jsonl."""
    if path.exists() and path.stat().st_size:
        count = 1
        while (other := path.with_name(f"{path.stem}.{count}{path.suffix}")).exists():
            count += 1
        path.rename(other)


def append(path: Path, record: Mapping[str, object]) -> None:
    """Append one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(record) + "\n")


def begin(path: Path, resumed_from: int | None) -> None:
    """Prepare a file of lines with a `step` for a new or a resumed run."""
    if resumed_from is None:
        set_aside(path)
    elif path.exists():
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")
        kept = [line for line in lines if _is_kept(line, resumed_from)]
        replace_text(path, "".join(f"{line}\n" for line in kept))


def _is_kept(line: str, last_step: int) -> bool:
    """Whether a line is complete (a killed process may have left a part) and not after the last step."""
    try:
        return bool(json.loads(line)["step"] <= last_step)
    except (ValueError, KeyError, TypeError):
        return False
