"""Which runs lie under a folder. A run is known by its files, and to the browser by a number made of its place: no path of a
request ever reaches the disk."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from strop.run.layout import LATEST, RECORDED, step_of
from strop.run.samples import FOLDER

METRICS, CONFIG, ALERTS = "metrics.jsonl", "metrics.config.json", "alerts.jsonl"
DEEPEST = 6
"""Folders below the root in which runs are looked for."""
MOST_FOLDERS = 20_000
FRESH = 2.0
"""Seconds for which a list of runs is taken as it is."""


class NotFound(LookupError):
    """What was asked for is not there."""


@dataclass(frozen=True)
class RunFolder:
    id: str
    name: str
    """Its place below the root."""
    path: Path

    def file(self, name: str) -> Path:
        """A file of the run. A link that leads elsewhere is not followed: the board shows this folder and nothing else."""
        path = self.path / name
        if path.is_symlink():
            raise NotFound(f"{name} of {self.name} is a link, which the board does not follow.")
        return path


class Runs:
    """The runs under a root, looked for again when somebody asks and the list is older than FRESH."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._found: dict[str, RunFolder] = {}
        self._until = 0.0
        self._lock = threading.Lock()

    def all(self) -> dict[str, RunFolder]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._found = {run.id: run for run in find_runs(self.root)}
                self._until = time.monotonic() + FRESH
            return self._found

    def get(self, run_id: str) -> RunFolder:
        run = self.all().get(run_id)
        if run is None:
            raise NotFound("There is no such run here (any more).")
        return run


def find_runs(root: Path) -> list[RunFolder]:
    """By name. Folders that cannot be read are passed over, and links are not followed."""
    found = []
    for folder, inner, files in islice(os.walk(root), MOST_FOLDERS):
        path = Path(folder)
        if is_run(inner, files):
            name = path.relative_to(root).as_posix()
            found.append(RunFolder(_id(name), root.name if name == "." else name, path))
        deep = len(path.relative_to(root).parts) >= DEEPEST
        inner[:] = [] if deep else sorted(name for name in inner if not _never_a_run(name))
    return sorted(found, key=lambda run: run.name)


def is_run(folders: list[str], files: list[str]) -> bool:
    if {METRICS, CONFIG, LATEST, ALERTS} & set(files):
        return True
    return any(step_of(Path(name)) is not None for name in folders)


def _never_a_run(name: str) -> bool:
    return name == RECORDED or name.startswith(".") or name.partition(".")[0] == FOLDER or step_of(Path(name)) is not None


def _id(name: str) -> str:
    return hashlib.blake2s(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
