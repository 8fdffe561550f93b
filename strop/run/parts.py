"""A long job over rows that survives a kill: finished rows lie in small files beside the output until all are there.

    OUT.parquet.parts/job.json            what the job is; another job does not go on from here
    OUT.parquet.parts/000007-4f1d.json    some finished rows, {"12": value, ...}
    OUT.parquet                           appears whole, at the end; then the folder goes

Every file is written beside its name and renamed. Places are paths of this machine or any fsspec address.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from strop.run.durable import flush_file, flush_folder, write_file

log = logging.getLogger(__name__)

JOB = "job.json"


class Parts:
    """The finished rows of one job. Several processes may add rows at the same time."""

    def __init__(self, output: str, job: Mapping[str, Any]):
        """`job` says what a row's value depends on, as plain values; it must be the same when the job goes on."""
        self.output = output
        self.job = json.loads(json.dumps(job))
        self._system, self._target = place(output)
        self._folder = f"{self._target}.parts"

    @property
    def started(self) -> bool:
        return bool(self._system.exists(f"{self._folder}/{JOB}"))

    @property
    def output_exists(self) -> bool:
        return bool(self._system.exists(self._target))

    def open(self) -> dict[int, Any]:
        """The rows that earlier processes finished; starts the job where there was none."""
        if not self.started:
            self._system.makedirs(self._folder, exist_ok=True)
            self._write(JOB, self.job)
            return {}
        before = json.loads(self._system.cat_file(f"{self._folder}/{JOB}"))
        refuse_other_job(f"{self.output}.parts holds finished rows of another job", before, self.job)
        return self.finished()

    def finished(self) -> dict[int, Any]:
        rows: dict[int, Any] = {}
        self._system.invalidate_cache()
        for name in sorted(self._system.ls(self._folder, detail=False)):
            if name.endswith(".json") and not name.endswith(f"/{JOB}"):
                rows |= self._read(name)
        return rows

    def add(self, rows: Mapping[int, Any]) -> None:
        """Put finished rows where a kill cannot reach them."""
        self._write(f"{min(rows):08d}-{secrets.token_hex(4)}.json", {str(row): value for row, value in rows.items()})

    def finish(self, write: Callable[[Path], object]) -> None:
        """Publish the output that `write` makes at the path it is given, then clear the parts away."""
        publish(self.output, write)
        self._system.rm(self._folder, recursive=True)

    def _read(self, name: str) -> dict[int, Any]:
        try:
            return {int(row): value for row, value in json.loads(self._system.cat_file(name)).items()}
        except (ValueError, AttributeError) as error:
            log.warning("%s cannot be read (%s); its rows are done again.", name, error)
            self._system.rm_file(name)
            return {}

    def _write(self, name: str, content: Any) -> None:
        publish(f"{self._folder}/{name}", lambda path: _dump(path, content), system=self._system)


def publish(address: str, write: Callable[[Path], object], *, system: Any = None) -> None:
    """What `write` makes at the path it is given appears under `address`, whole or not at all."""
    system, target = (system, address) if system is not None else place(address)
    folder, _, name = target.rpartition("/")
    mark = f".{name}.{secrets.token_hex(4)}.part"
    if isinstance(system, LocalFileSystem):
        aside = Path(folder or ".") / mark
        aside.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(aside)
            flush_file(aside)
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        flush_folder(aside.parent)
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as here:
        write(Path(here) / name)
        system.makedirs(folder, exist_ok=True)
        system.put_file(str(Path(here) / name), f"{folder}/{mark}")
        system.mv(f"{folder}/{mark}", target)


def place(address: str) -> tuple[Any, str]:
    """The file system of an address and the path in it."""
    try:
        return fsspec.core.url_to_fs(os.path.expanduser(address))
    except (ValueError, ImportError) as error:
        raise ValueError(f"{address} cannot be written: {error}") from error


def refuse_other_job(said: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        named = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in differing)
        raise ValueError(f"{said}: {named}. Choose another output_path, or delete it to begin again.")


def _dump(path: Path, content: Any) -> None:
    write_file(path, [json.dumps(content).encode()])
