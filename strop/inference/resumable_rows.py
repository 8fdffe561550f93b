"""Jobs over rows that can resume: finished rows are in small files next to the output until the job ends.

    OUT.parquet.parts/job.json            what the job is; a different job refuses to resume from it
    OUT.parquet.parts/1763441-4f1d.json   some finished rows, {"12": value, ...}; named by the time
    OUT.parquet                           written at the end, atomically; then the folder is deleted

Every file is written under a temporary name and renamed. Addresses are local paths or fsspec URLs.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from strop.run.atomic_files import flush_file, flush_folder, write_file

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

log = logging.getLogger(__name__)

JOB = "job.json"


class PartialOutput:
    """The finished rows of one job. Several processes may add rows at the same time."""

    def __init__(self, output: str, job: Mapping[str, object]):
        """`job` holds the JSON values that determine the results; they must be the same on resume."""
        self.output = output
        self.job = json.loads(json.dumps(job))
        self._system, self._target = resolve_address(output)
        self._folder = f"{self._target}.parts"

    @property
    def started(self) -> bool:
        return bool(self._system.exists(f"{self._folder}/{JOB}"))

    @property
    def output_exists(self) -> bool:
        return bool(self._system.exists(self._target))

    def open(self) -> dict[int, Any]:
        """The rows that earlier processes finished; starts the job if there is none."""
        if not self.started:
            self._system.makedirs(self._folder, exist_ok=True)
            self._write(JOB, self.job)
            return {}
        self.reject_other()
        return self.finished()

    def reject_other(self) -> None:
        """Raise if the finished rows are of another job."""
        if self.started:
            before = json.loads(self._system.cat_file(f"{self._folder}/{JOB}"))
            reject_other_job(f"{self.output}.parts holds finished rows of another job", before, self.job)

    def finished(self) -> dict[int, Any]:
        """All rows that are finished so far. Of a row that was done again, the later value."""
        rows: dict[int, Any] = {}
        self._system.invalidate_cache()
        for name in sorted(self._system.ls(self._folder, detail=False)):
            if name.endswith(".json") and not name.endswith(f"/{JOB}"):
                rows |= self._read(name)
        return rows

    def add(self, rows: Mapping[int, object]) -> None:
        """Store finished rows on disk."""
        name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
        self._write(name, {str(row): value for row, value in rows.items()})

    def finish(self, write: Callable[[Path], object]) -> None:
        """Publish the output that `write` makes at the path it is given, then delete the folder of parts."""
        publish(self.output, write)
        self._system.rm(self._folder, recursive=True)

    def _read(self, name: str) -> dict[int, Any]:
        try:
            return {int(row): value for row, value in json.loads(self._system.cat_file(name)).items()}
        except (ValueError, AttributeError) as error:
            log.warning("%s cannot be read (%s); its rows are done again.", name, error)
            self._system.rm_file(name)
            return {}

    def _write(self, name: str, content: object) -> None:
        publish(f"{self._folder}/{name}", lambda path: _dump(path, content), system=self._system)


def publish(
    address: str, write: Callable[[Path], object], *, system: AbstractFileSystem | None = None
) -> None:
    """Store the file that `write` makes at the path it is given under `address`, atomically."""
    target = address
    if system is None:
        system, target = resolve_address(address)
    folder, _, name = target.rpartition("/")
    mark = f".{name}.{secrets.token_hex(4)}.part"
    if isinstance(system, LocalFileSystem):
        temporary_file = Path(folder or ".") / mark
        temporary_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary_file)
            flush_file(temporary_file)
            os.replace(temporary_file, target)
        except BaseException:
            temporary_file.unlink(missing_ok=True)
            raise
        flush_folder(temporary_file.parent)
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as temporary:
        write(Path(temporary) / name)
        system.makedirs(folder, exist_ok=True)
        system.put_file(str(Path(temporary) / name), f"{folder}/{mark}")
        system.mv(f"{folder}/{mark}", target)


def resolve_address(address: str) -> tuple[AbstractFileSystem, str]:
    """The file system of an address and the path in it."""
    try:
        return fsspec.core.url_to_fs(os.path.expanduser(address))
    except (ValueError, ImportError) as error:
        raise ValueError(f"{address} cannot be written: {error}") from error


def reject_other_job(message: str, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise if two jobs differ, with the keys that do."""
    changes: list[str] = []
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            changes.append(f"{key} was {before.get(key)!r} and is {now.get(key)!r}")
    if changes:
        raise ValueError(
            f"{message}: {', '.join(changes)}. Choose another output_path, or delete it to begin again."
        )


def _dump(path: Path, content: object) -> None:
    write_file(path, [json.dumps(content).encode()])


# Progress: a bar on a terminal, otherwise a log line from time to time.


SECONDS_BETWEEN_LINES = 15.0


class ProgressBar:
    """Shows the items done, the time left and, where tokens are counted, tokens per second."""

    def __init__(self, what: str, total: int, *, done: int = 0, unit: str = "items"):
        """`done` items were finished before this process."""
        self.what = what
        self.total = total
        self.unit = unit
        self.done = done
        self.fresh = 0
        self.tokens = 0
        self.start = time.monotonic()
        self.logged = self.start
        self.bar = _bar(what, total, done, unit)

    def __enter__(self) -> ProgressBar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, count: int, tokens: int = 0) -> None:
        """Add finished items, and update the bar or the log."""
        self.done += count
        self.fresh += count
        self.tokens += tokens
        now = time.monotonic()
        speed = ""
        if self.tokens:
            speed = f"{self.tokens / max(now - self.start, 1e-9):.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, speed=speed)
        elif now - self.logged >= SECONDS_BETWEEN_LINES and self.done < self.total:
            self.logged = now
            left = (now - self.start) / self.fresh * (self.total - self.done)
            log.info(
                "%s: %d of %d %s, %s%.0f s left",
                self.what,
                self.done,
                self.total,
                self.unit,
                speed and speed + ", ",
                left,
            )


def _bar(what: str, total: int, done: int, unit: str) -> RichProgress | None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    bar = Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TextColumn(unit),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=600,
    )
    bar.add_task(what, total=total, completed=done, speed="")
    return bar
