"""The runs under a folder, and the steps of which a run has samples.

A run is recognized by its files. The browser names it by a hash of its path, so no path from a request is
ever opened.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from strop.run.checkpoint.layout import LATEST, RECORDED, step_of
from strop.run.sample_table import FOLDER, parse_name

METRICS = "metrics.jsonl"
CONFIG = "metrics.config.json"
ALERTS = "alerts.jsonl"
MAX_DEPTH = 6
"""Levels of folders below the root that are searched for runs."""
MAX_FOLDERS = 20_000
FRESH = 2.0
"""Seconds for which a list of runs is reused."""


class NotFound(LookupError):
    """A request for something that does not exist."""


@dataclass(frozen=True)
class RunFolder:
    """A run under the root."""

    id: str
    name: str
    """Its path below the root."""
    path: Path

    def file(self, name: str) -> Path:
        """The path of a file of the run. Symbolic links are refused: the board must not show files outside
        of the folder. So are pipes and devices, whose reader would wait for ever."""
        path = self.path / name
        if path.is_symlink():
            raise NotFound(f"{name} of {self.name} is a link, which the board does not follow.")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise NotFound(f"{name} of {self.name} is no file.")
        return path


class RunIndex:
    """The runs under a root. The list is read again when a request comes and it is older than FRESH."""

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
    """All runs, sorted by name. Unreadable folders are skipped, and links are not followed."""
    found: list[RunFolder] = []
    for folder, inner, files in islice(os.walk(root), MAX_FOLDERS):
        path = Path(folder)
        below_root = path.relative_to(root)
        if is_run(inner, files):
            found.append(_run_folder(root, path))
        if len(below_root.parts) >= MAX_DEPTH:
            inner.clear()
        else:  # os.walk visits what remains in the list, in this order
            inner[:] = sorted(name for name in inner if not _never_a_run(name))
    return sorted(found, key=lambda run: run.name)


def _run_folder(root: Path, path: Path) -> RunFolder:
    name = path.relative_to(root).as_posix()
    run_id = _id(name)
    if name == ".":
        name = root.name
    return RunFolder(run_id, name, path)


def is_run(folders: list[str], files: list[str]) -> bool:
    """Whether a folder with these folders and files is a run."""
    if {METRICS, CONFIG, LATEST, ALERTS} & set(files):
        return True
    return any(step_of(Path(name)) is not None for name in folders)


def _never_a_run(name: str) -> bool:
    return (
        name == RECORDED
        or name.startswith(".")
        or name.partition(".")[0] == FOLDER
        or step_of(Path(name)) is not None
    )


def _id(name: str) -> str:
    return hashlib.blake2s(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


# The steps that have samples, from the names of the files. The listing of a folder is cached until the folder
# changes.


SPLITS = ("train", "validation")
MAX_CACHED_STEPS = 1_000_000
"""Over all folders in the cache, 8 bytes each."""
MINIMUM_AGE_NS = 100_000_000
"""A listing is cached if the folder was at least this old. A younger folder may change again without a change
of its modification time, because clocks of file systems are coarse."""

Steps: TypeAlias = "dict[str, array[int]]"
"""Sorted steps of each split."""


class StepListingCache:
    """The steps with samples of each run folder."""

    def __init__(self, limit: int = MAX_CACHED_STEPS) -> None:
        self.limit = limit
        self._known: OrderedDict[Path, tuple[tuple[int, int], Steps]] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self, folder: Path) -> Steps:
        """The steps in a folder of samples; empty if there is no such folder."""
        try:
            before = folder.stat()
        except OSError:
            return {split: array("q") for split in SPLITS}
        state = (before.st_ino, before.st_mtime_ns)
        with self._lock:
            known = self._known.get(folder)
            if known is not None and known[0] == state:
                self._known.move_to_end(folder)
                return known[1]
        now = time.time_ns()
        found = list_steps(folder)
        if before.st_mtime_ns < now - MINIMUM_AGE_NS:
            self._keep(folder, state, found)
        return found

    def _keep(self, folder: Path, state: tuple[int, int], found: Steps) -> None:
        with self._lock:
            self._known[folder] = (state, found)
            self._known.move_to_end(folder)
            while len(self._known) > 1 and self._total_steps() > self.limit:
                self._known.popitem(last=False)

    def _total_steps(self) -> int:
        total = 0
        for _, steps in self._known.values():
            total += sum(map(len, steps.values()))
        return total


def list_steps(folder: Path) -> Steps:
    """The steps of each split in a folder of samples, from the names of its files."""
    found: dict[str, list[int]] = {split: [] for split in SPLITS}
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    for split, step in filter(None, map(parse_name, names)):
        found[split].append(step)
    return {split: array("q", sorted(steps)) for split, steps in found.items()}
