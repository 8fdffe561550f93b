"""The `file` tracker: metrics.jsonl in the run's folder, one line {"step", "time", "data"} per log, on its way at once.

A resumed run appends, after cutting off what was logged after the step it resumes from. A new run in the same folder leaves an
older file beside, under a number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.run.durable import flush_file, replace_text
from strop.run.plain_json import to_json
from strop.run.tracking import Metrics, Rows, Run


class JsonlTracker:
    def __init__(self, run: Run, *, path: Path | None = None, clock: Callable[[], float] = time.time):
        self.path = path or default_path(run)
        self.samples = self.path.with_suffix(".generations.jsonl")
        self.clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path.with_suffix(".config.json"), to_json(run.config, indent=1))
        for file in (self.path, self.samples):
            begin(file, run.resumed_from)
        # A place that cannot be written to must be known now, not at the first step.
        self.path.open("a").close()

    def log(self, metrics: Metrics, step: int) -> None:
        append(self.path, {"step": step, "time": self.clock(), "data": metrics})

    def log_generations(self, rows: Rows, step: int) -> None:
        append(self.samples, {"step": step, "time": self.clock(), "rows": list(rows)})

    def close(self) -> None:
        for file in (self.path, self.samples):
            if file.exists():
                flush_file(file)


def default_path(run: Run) -> Path:
    """metrics.jsonl in the run's folder, unless the environment names another place as verl's file logger reads it."""
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


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One more line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(record) + "\n")


def begin(path: Path, resumed_from: int | None) -> None:
    """Make a file of lines with a `step` ready for a run that starts, or goes on from a step."""
    if resumed_from is None:
        set_aside(path)
    elif path.exists():
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")
        replace_text(path, "".join(f"{line}\n" for line in lines if _belongs(line, resumed_from)))


def _belongs(line: str, last_step: int) -> bool:
    """Whether a line is whole (a killed process may have left a part of one) and of a step that counts."""
    try:
        return bool(json.loads(line)["step"] <= last_step)
    except (ValueError, KeyError, TypeError):
        return False
