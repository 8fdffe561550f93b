"""Which steps have samples, by the names of files alone; a folder that did not change is not listed again."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

from strop.run.samples import parse_name

SPLITS = ("train", "validation")
MOST_STEPS = 1_000_000
"""Over all folders in memory, 8 bytes each."""
SETTLED = 100_000_000
"""Nanoseconds: a folder that changed less than this before it was listed may have changed once more at the same time of the
file system's clock."""

Steps: TypeAlias = "dict[str, array[int]]"
"""Ascending, of each split."""


class Listings:
    def __init__(self, most: int = MOST_STEPS) -> None:
        self.most = most
        self._known: OrderedDict[Path, tuple[tuple[int, int], Steps]] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self, folder: Path) -> Steps:
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
        if before.st_mtime_ns < now - SETTLED:
            self._keep(folder, state, found)
        return found

    def _keep(self, folder: Path, state: tuple[int, int], found: Steps) -> None:
        with self._lock:
            self._known[folder] = (state, found)
            self._known.move_to_end(folder)
            while (
                len(self._known) > 1
                and sum(len(steps) for _, kept in self._known.values() for steps in kept.values()) > self.most
            ):
                self._known.popitem(last=False)


def list_steps(folder: Path) -> Steps:
    found: dict[str, list[int]] = {split: [] for split in SPLITS}
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    for split, step in filter(None, map(parse_name, names)):
        found[split].append(step)
    return {split: array("q", sorted(steps)) for split, steps in found.items()}
