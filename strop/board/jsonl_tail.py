"""Reads a growing file of JSON lines from where the last read stopped.

An incomplete line at the end is left for later, a line that is no JSON object is counted and skipped, and a
file that was replaced (by a resumed run) is read again from the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 16 << 20


class FileTail:
    """The position in a growing file."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.damaged = 0
        """Lines that could not be read."""
        self.generation = 0
        """How often the file was found replaced."""
        self._identity: tuple[int, int] | None = None
        self._rest = b""
        self._skipping = False

    def replaced(self) -> bool:
        """Whether the file was replaced or deleted; then everything read from it is void."""
        try:
            stat = self.path.stat()
        except OSError:
            identity = None
            size = 0
        else:
            identity = (stat.st_dev, stat.st_ino)
            size = stat.st_size
        other = self._identity is not None and (identity != self._identity or size < self.offset)
        if other:
            self.offset = 0
            self.damaged = 0
            self._rest = b""
            self._skipping = False
            self.generation += 1
        self._identity = identity
        return other

    def new(self) -> Iterator[dict[str, object]]:
        """The objects in the lines that were added."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while piece := file.read(CHUNK_BYTES):
                self.offset += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    yield from self._parsed(line)
                if len(self._rest) > MAX_LINE_BYTES:
                    self._rest = b""
                    self._skipping = True

    def _parsed(self, line: bytes) -> Iterator[dict[str, object]]:
        if self._skipping:
            self._skipping = False
            self.damaged += 1
            return
        if not line.strip():
            return
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        else:
            self.damaged += 1
