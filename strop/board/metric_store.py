"""Metrics of many runs in memory, within a limit, and without anybody waiting for a long file that only a list needs."""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from strop.board.curves import MetricFile

MOST_VALUES = 16_000_000
"""Over all runs in memory, 12 bytes each; the runs that nobody asked about for longest are forgotten first."""
LONG = 1 << 20
"""Bytes that take longer to read than a reader of a list should wait."""
END = 256 << 10
"""Bytes at the end of a long file at which a glance looks."""

Question: TypeAlias = Callable[[MetricFile], Any]
State: TypeAlias = tuple[int, int, int]
"""Inode, size and time of a file: as long as they stay, so does its content."""


class MetricStore:
    """Metric files in memory, within MOST_VALUES."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self.most = most
        self._files: OrderedDict[Path, MetricFile] = OrderedDict()
        self._standing: dict[Path, tuple[State, Any]] = {}
        self._lock = threading.Lock()
        self._late: queue.SimpleQueue[tuple[Path, Question]] = queue.SimpleQueue()
        self._waiting: set[Path] = set()
        """Files that the reader has not read yet."""
        self._reader: threading.Thread | None = None

    def ask(self, path: Path, question: Question) -> Any:
        """Bring the file up to date and ask it something."""
        with self._lock:
            file = self._files.setdefault(path, MetricFile(path))
            self._files.move_to_end(path)
        with file.lock:
            file.refresh()
            answer = question(file)
        self._forget()
        return answer

    def standing(self, path: Path, question: Question) -> Any:
        """The answer to what is asked of every run again and again, always the same question. It is kept while the file is as
        it was, also when its values are forgotten: a list of more runs than fit into memory reads each of them once. Nobody
        waits for a long file: the answer is then what its two ends tell, until a thread has read the rest."""
        try:
            state = _state(path)
        except OSError:
            return self.ask(path, question)
        known = self._standing.get(path)
        if known is not None and known[0] == state:
            return known[1]
        if self._unread(path, state) > LONG:
            self._read_later(path, question)
            return question(glance(path))
        return self._read(path, question)

    def _read(self, path: Path, question: Question) -> Any:
        state = _state(path)
        answer = self.ask(path, question)
        self._standing[path] = (state, answer)
        return answer

    def _unread(self, path: Path, state: State) -> int:
        file = self._files.get(path)
        return state[1] - (0 if file is None or path in self._waiting else file.tail.offset)

    def _read_later(self, path: Path, question: Question) -> None:
        with self._lock:
            if path in self._waiting:
                return
            self._waiting.add(path)
            if self._reader is None:
                self._reader = threading.Thread(target=self._work, name="metrics", daemon=True)
                self._reader.start()
        self._late.put((path, question))

    def _work(self) -> None:
        while True:
            path, question = self._late.get()
            try:
                self._read(path, question)
            except OSError:  # the next who asks for the list is told
                pass
            finally:
                self._waiting.discard(path)

    def _forget(self) -> None:
        with self._lock:
            while len(self._files) > 1 and sum(file.size for file in self._files.values()) > self.most:
                self._files.popitem(last=False)


def glance(path: Path) -> MetricFile:
    """The first line and the last ones, as if there were no others."""
    file = MetricFile(path)
    with path.open("rb") as stream:
        first = stream.readline(END)
        size = stream.seek(0, 2)
        # What stands before the first line break belongs to a line that is not whole, or is nothing.
        stream.seek(max(0, len(first) - 1, size - END))
        lines = [first, *stream.read(END).split(b"\n")[1:-1]]
    file.take(value for line in lines if isinstance(value := _parsed(line), dict))
    file.tail.damaged, file.tail.offset = 0, size
    return file


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _state(path: Path) -> State:
    facts = path.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
