"""Trackers that write files in the run's folder.

    file, jsonl   metrics.jsonl, one line {"step", "time", "data"} per call, written at once
    csv           metrics.csv, a row per call and a column per metric; a metric that appears later becomes a
                  new column. Samples go to generations.csv in the same way.

A resumed run removes what came after the step that it resumes from, then appends. A new run in the same
folder renames an older file to metrics.1.jsonl. The lines of `file` wait in memory while the disk is full.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from strop.run.atomic_files import flush_file, replace_text, to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun

log = logging.getLogger(__name__)
MAX_WAITING = 10_000
"""Lines that wait for a disk that fails; older ones are dropped."""


LONGEST_FIELD = 1 << 30
"""Characters of a CSV field that can be read back. The limit of the csv module, 131072, is less than a long
response."""


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
        self._lines = WaitingLines(self.path)
        self._sample_lines = WaitingLines(self.samples)

    def log(self, metrics: Metrics, step: int) -> None:
        self._lines.add({"step": step, "time": self.clock(), "data": metrics})

    def log_generations(self, rows: Rows, step: int) -> None:
        self._sample_lines.add({"step": step, "time": self.clock(), "rows": list(rows)})

    def close(self) -> None:
        self._lines.write()
        self._sample_lines.write()
        for file in (self.path, self.samples):
            if file.exists():
                flush_file(file)


class WaitingLines:
    """Lines for a file. Those that cannot be written wait for the next one: a disk that is full for a while
    must not cost the metrics of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[Mapping[str, object]] = deque(maxlen=MAX_WAITING)
        self._failed = False

    def add(self, record: Mapping[str, object]) -> None:
        self._waiting.append(record)
        try:
            self.write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("%s cannot be written (%s): its lines wait in memory.", self.path, error)
            return
        if self._failed:
            self._failed = False
            log.info("%s is written again, without gaps.", self.path)

    def write(self) -> None:
        """Write what waits."""
        while self._waiting:
            append(self.path, self._waiting[0])
            self._waiting.popleft()


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
    """Append one line, or nothing if that fails: the next line would continue half of one."""
    line = memoryview((to_json(record) + "\n").encode())
    with path.open("ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe
                file.truncate(end)
            raise


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


class CsvTracker:
    def __init__(self, run: TrackedRun, *, clock: Callable[[], float] = time.time):
        run.directory.mkdir(parents=True, exist_ok=True)
        self.clock = clock
        replace_text(run.directory / "metrics.config.json", to_json(run.config, indent=1))
        self.metrics = GrowingTable(run.directory / "metrics.csv", run.resumed_from)
        self.samples = GrowingTable(run.directory / "generations.csv", run.resumed_from)

    def log(self, metrics: Metrics, step: int) -> None:
        self.metrics.append({"step": step, "time": self.clock(), **metrics})

    def log_generations(self, rows: Rows, step: int) -> None:
        for row in rows:
            self.samples.append({**row, "step": step})

    def close(self) -> None:
        for table in (self.metrics, self.samples):
            if table.path.exists():
                flush_file(table.path)


class GrowingTable:
    """A CSV file whose header may get longer. Rows have at least a `step`."""

    def __init__(self, path: Path, resumed_from: int | None):
        self.path = path
        self.columns: list[str] = []
        if resumed_from is None:
            set_aside(path)
        elif path.exists():
            kept = []
            for row in self._read():
                if row["step"].isdigit() and int(row["step"]) <= resumed_from:
                    kept.append(row)
            self._write(kept)

    def append(self, row: Mapping[str, object]) -> None:
        new = [column for column in row if column not in self.columns]
        if new:
            rows = self._read()
            self.columns = self.columns + new
            self._write(rows)
        with self.path.open("a", newline="", encoding="utf-8", errors="replace") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _read(self) -> list[dict[str, str]]:
        """The complete rows; also sets the columns. A row that a killed process did not finish has fewer
        fields."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            text = file.read()
        csv.field_size_limit(LONGEST_FIELD)
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        self.columns = list(reader.fieldnames or [])
        return [row for row in reader if None not in row and None not in row.values()]

    def _write(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        if self.columns:
            writer.writeheader()
        writer.writerows(rows)
        replace_text(self.path, text.getvalue())
