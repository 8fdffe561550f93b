"""The replies of a judge by question, so that the same question is not sent twice.

Without a file, the replies used last stay in memory, up to MAX_CHARACTERS: a run asks millions of questions.
With a file, which later runs read, memory has the position of each reply in the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)
MAX_CHARACTERS = 64 * 1024**2


class ReplyCache:
    """Replies by the key of their question."""

    def __init__(self, path: str | None):
        self.path: Path | None = None
        self._replies: dict[str, str] = {}
        """In the order of their last use."""
        self._characters = 0
        self._positions: dict[str, int] = {}
        """Where the line of a reply begins in the file."""
        self._lock = threading.Lock()
        self._warned = False
        if path:
            self.path = Path(path).expanduser()
            self._load(self.path)

    def find(self, keys: Iterable[str]) -> dict[str, str]:
        """The replies that are known."""
        found: dict[str, str] = {}
        with self._lock:
            in_file: dict[str, int] = {}
            for key in keys:
                if key in self._replies:
                    found[key] = self._replies[key] = self._replies.pop(key)
                elif key in self._positions:
                    in_file[key] = self._positions[key]
            if self.path is not None and in_file:
                try:
                    found |= _read(self.path, in_file)
                except OSError as error:
                    self._warn(error)
        return found

    def add(self, replies: Mapping[str, str]) -> None:
        """Keep replies, in the file or else in memory."""
        if not replies:
            return
        with self._lock:
            if self.path is not None:
                try:
                    self._append(self.path, replies)
                    return
                except OSError as error:
                    self._warn(error)
            for key, reply in replies.items():
                self._characters += len(reply) - len(self._replies.pop(key, ""))
                self._replies[key] = reply
            while self._characters > MAX_CHARACTERS:
                oldest = next(iter(self._replies))
                self._characters -= len(self._replies.pop(oldest))

    def _warn(self, error: OSError) -> None:
        """Once: a full disk must not end a run whose judge has answered."""
        if not self._warned:
            self._warned = True
            log.warning(
                "reward_model.judge.cache_path=%s failed: %s. Replies stay in memory while it fails.",
                *(self.path, error),
            )

    def _load(self, path: Path) -> None:
        if not path.is_file():
            return
        position = 0
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a killed run left half a line
                    self._positions[str(json.loads(line)["key"])] = position
                position += len(line)

    def _append(self, path: Path, replies: Mapping[str, str]) -> None:
        """Append lines. Other processes may append to the same file: `_read` compares the keys."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            end = file.tell()
            positions: dict[str, int] = {}
            text = bytearray()
            if not _ends_with_newline(file, end):
                text += b"\n"
            for key, reply in replies.items():
                positions[key] = end + len(text)
                text += json.dumps({"key": key, "reply": reply}).encode() + b"\n"
            try:
                file.write(text)
                file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        self._positions.update(positions)


def _ends_with_newline(file: BinaryIO, end: int) -> bool:
    if not end:
        return True
    file.seek(end - 1)
    return file.read(1) == b"\n"


def _read(path: Path, positions: Mapping[str, int]) -> dict[str, str]:
    """The replies whose lines begin at these positions, without those of other lines."""
    found: dict[str, str] = {}
    with path.open("rb") as file:
        for key, position in positions.items():
            file.seek(position)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(file.readline())
                if entry["key"] == key:
                    found[key] = str(entry["reply"])
    return found
