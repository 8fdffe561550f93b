"""Files in which a search found nothing. Samples are written once, so nobody needs to look there again.

Where one text is missing, any longer text that holds it is missing too: a reader who goes on typing, or who narrows a search to
some kind of prompts, is spared the same files.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

MOST_FILES = 250_000
"""Over all searches in memory, about 100 bytes each; the searches that nobody repeated for longest are forgotten first."""


@dataclass(frozen=True)
class Wanted:
    """What is looked for in every file of a folder."""

    folder: Path
    split: str
    show: str = "all"
    search: str = ""
    row: tuple[int, str] | None = None
    """Index and source of a row of the data."""

    @property
    def text(self) -> str:
        """Searches do not tell large letters from small ones; beyond ASCII the two have no simple pairs."""
        return self.search.lower() if self.search.isascii() else self.search

    def follows(self, other: Wanted) -> bool:
        """Whether a file without the other has none of this."""
        same = (self.folder, self.split, self.row) == (other.folder, other.split, other.row)
        return same and other.show in ("all", self.show) and other.text in self.text


class Without:
    """Files that have nothing of what is wanted, each by its step and what identifies the file behind it."""

    def __init__(self, own: dict[int, int], others: list[dict[int, int]]):
        self._own, self._others = own, others

    def has(self, step: int, file: int) -> bool:
        if self._own.get(step) == file:
            return True
        return any(other.get(step) == file for other in self._others)

    def add(self, step: int, file: int) -> None:
        self._own[step] = file


class Misses:
    def __init__(self, most: int = MOST_FILES) -> None:
        self.most = most
        self._known: OrderedDict[Wanted, dict[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, wanted: Wanted) -> Without:
        with self._lock:
            own = self._known.setdefault(wanted, {})
            self._known.move_to_end(wanted)
            while len(self._known) > 1 and sum(map(len, self._known.values())) > self.most:
                self._known.popitem(last=False)
            others = [files for other, files in self._known.items() if other != wanted and wanted.follows(other)]
        return Without(own, others)
