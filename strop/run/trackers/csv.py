"""The `csv` tracker: metrics.csv in the run's folder, a row per call and a column per metric.

A metric that appears later becomes a new column. Samples go to generations.csv in the same way. Resumed and
new runs treat existing files as the `file` tracker does.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from strop.run.atomic_files import flush_file, replace_text, to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun
from strop.run.trackers.jsonl import set_aside


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
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _read(self) -> list[dict[str, str]]:
        """The complete rows; also sets the columns. A row that a killed process did not finish has fewer
        fields."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            text = file.read()
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
