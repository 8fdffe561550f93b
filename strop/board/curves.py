"""Metrics of runs as columns in memory, and curves of them with no more points than a screen has.

A growing file of JSON lines is read from where the last read stopped. An incomplete line at the end is left
for later, a line that is no JSON object is counted and skipped, and a file that was replaced (by a resumed
run) is read again from the start. The store keeps the metrics of many runs within a memory limit; a list of
runs does not wait for long files.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import numpy as np

Curve: TypeAlias = Mapping[str, Sequence[float | None]]
"""step, time and value of each point."""
T = TypeVar("T")
MAX_METRICS = 4000
MAX_STEP = 1 << 53
BLOCK = 256
"""Lines that are added to the columns at once."""
CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 16 << 20


@dataclass
class Column:
    rows: array[int] = field(default_factory=lambda: array("i"))
    """Lines of the file in which the metric appears."""
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricFile:
    """metrics.jsonl as columns, as far as it was read."""

    def __init__(self, path: Path):
        self.tail = FileTail(path)
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.steps: array[int] = array("q")
        self.times: array[float] = array("d")
        self.columns: dict[str, Column] = {}
        self.size = 0

    def refresh(self) -> None:
        """Read what was added; call with the lock held."""
        if self.tail.replaced():
            self._clear()
        self.take(self.tail.new())

    def take(self, lines: Iterable[dict[str, object]]) -> None:
        names: tuple[str, ...] = ()
        block: list[Iterable[object]] = []
        for line in lines:
            step = line.get("step")
            data = line.get("data")
            if not isinstance(step, int) or abs(step) > MAX_STEP or not isinstance(data, dict):
                self.tail.damaged += 1
                continue
            if len(block) == BLOCK or names != tuple(data):
                self._add(names, block)
                names = tuple(data)
                block = []
            self.steps.append(step)
            time = _number(line.get("time"))
            self.times.append(math.nan if time is None else time)
            block.append(data.values())
        self._add(names, block)

    def _add(self, names: Sequence[str], block: Sequence[Iterable[object]]) -> None:
        """The latest lines, which all have these metrics: by columns, because a million values one by one
        take seconds."""
        start = len(self.steps) - len(block)
        for name, values in zip(names, zip(*block)):
            column = self.columns.get(name)
            if column is None and len(self.columns) >= MAX_METRICS:
                continue
            rows: Iterable[int] = range(start, len(self.steps))
            if set(map(type, values)) != {float}:
                rows, values = _numbers(start, values)
            if values and column is None:
                column = self.columns[name] = Column()
            if column is not None:
                column.rows.extend(rows)
                column.values.extend(values)
                self.size += len(values)

    def curve(self, name: str, points: int) -> Curve | None:
        column = self.columns.get(name)
        if column is None:
            return None
        rows = np.array(column.rows)
        values = np.array(column.values)
        kept = downsample(values, points)
        rows = rows[kept]
        return {
            "step": np.array(self.steps)[rows].tolist(),
            "time": _finite(np.array(self.times)[rows]),
            "value": _finite(values[kept]),
        }

    def shares(self, names: Sequence[str], points: int) -> dict[str, Curve]:
        """Curves to put on top of each other: all at the same steps, each the mean over a stretch of lines,
        in which a metric that a line does not have counts as 0."""
        count = len(self.steps)
        edges = np.unique(np.linspace(0, count, min(points, count) + 1).astype(int))
        last = edges[1:] - 1
        lengths = np.diff(edges)
        steps = np.array(self.steps)[last].tolist()
        times = _finite(np.array(self.times)[last])
        found: dict[str, Curve] = {}
        for name in names:
            if name in self.columns:
                values = np.nan_to_num(np.array(self.columns[name].values))
                sums = np.bincount(
                    np.searchsorted(last, np.array(self.columns[name].rows)), values, len(last)
                )
                found[name] = {"step": steps, "time": times, "value": (sums / lengths).tolist()}
        return found

    def latest(self, name: str) -> float | None:
        column = self.columns.get(name)
        return column.values[-1] if column else None


def downsample(values: np.ndarray, points: int) -> np.ndarray:
    """Positions of at most `points` values that draw the same picture: the lowest and the highest of each
    stretch, so that no spike is lost. Where a stretch has a value that is no number, one such is kept too."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, points // 3) + 1).astype(int)
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        piece = values[start:end]
        finite = np.isfinite(piece)
        if finite.any():
            kept.add(start + int(np.argmin(np.where(finite, piece, np.inf))))
            kept.add(start + int(np.argmax(np.where(finite, piece, -np.inf))))
        if not finite.all():
            kept.add(start + int(np.argmin(finite)))
    return np.array(sorted(kept))


def _numbers(start: int, values: Iterable[object]) -> tuple[list[int], tuple[float, ...]]:
    """Lines, counted from `start`, whose value is a number or the name of one that JSON cannot write."""
    rows: list[int] = []
    numbers: list[float] = []
    for row, value in enumerate(values, start):
        number = _number(value)
        if number is not None:
            rows.append(row)
            numbers.append(number)
    return rows, tuple(numbers)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _finite(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN and no infinity: both are a gap in a curve."""
    return [value if finite else None for value, finite in zip(values.tolist(), np.isfinite(values).tolist())]


def curves(file: MetricFile, names: Sequence[str], points: int, *, stacked: bool = False) -> dict[str, Curve]:
    """The curves of these metrics, by name."""
    if stacked:
        return file.shares(names, points)
    found = {}
    for name in names:
        curve = file.curve(name, points)
        if curve is not None:
            found[name] = curve
    return found


MAX_VALUES = 16_000_000
"""Over all runs in memory, 12 bytes each; the least recently used runs are evicted first."""
LONG_FILE = 1 << 20
"""Unread bytes that take too long to read while a list of runs waits."""
END = 256 << 10
"""Bytes at the end of a long file that `glance` reads."""
COMPARED = 256
"""Bytes before the position in a file that must be those that were read."""
State: TypeAlias = tuple[int, int, int]
"""Inode, size and modification time of a file: while they are unchanged, so is its content."""


class MetricStore:
    """Metric files in memory, within MAX_VALUES."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self.max_values = max_values
        self._files: OrderedDict[Path, MetricFile] = OrderedDict()
        self._answers: dict[Path, tuple[State, object]] = {}
        self._lock = threading.Lock()
        self._late: queue.SimpleQueue[tuple[Path, Callable[[MetricFile], object]]] = queue.SimpleQueue()
        self._waiting: set[Path] = set()
        """Files that the reader has not read yet."""
        self._reader: threading.Thread | None = None

    def ask(self, path: Path, question: Callable[[MetricFile], T]) -> T:
        """Read what was added to the file, and return the answer of `question`."""
        with self._lock:
            file = self._files.setdefault(path, MetricFile(path))
            self._files.move_to_end(path)
        with file.lock:
            file.refresh()
            answer = question(file)
        self._evict()
        return answer

    def cached(self, path: Path, question: Callable[[MetricFile], T]) -> T:
        """The answer of a question that is always the same, cached while the file is unchanged.

        The answer stays in memory when the values of the file are evicted. The answer about a long file comes
        from its two ends until a thread has read the rest.
        """
        try:
            state = _state(path)
        except OSError:
            return self.ask(path, question)
        known = self._answers.get(path)
        if known is not None and known[0] == state:
            return cast(T, known[1])
        if self._unread(path, state) > LONG_FILE:
            self._read_later(path, question)
            return question(glance(path))
        return self._read(path, question)

    def _read(self, path: Path, question: Callable[[MetricFile], T]) -> T:
        state = _state(path)
        answer = self.ask(path, question)
        self._answers[path] = (state, answer)
        return answer

    def _unread(self, path: Path, state: State) -> int:
        file = self._files.get(path)
        if file is None or path in self._waiting:
            return state[1]
        return state[1] - file.tail.offset

    def _read_later(self, path: Path, question: Callable[[MetricFile], object]) -> None:
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
            except OSError:  # the next request for the list reports it
                pass
            finally:
                self._waiting.discard(path)

    def _evict(self) -> None:
        with self._lock:
            while len(self._files) > 1 and sum(file.size for file in self._files.values()) > self.max_values:
                self._files.popitem(last=False)


def glance(path: Path) -> MetricFile:
    """A MetricFile of the first line and the last lines only."""
    file = MetricFile(path)
    with path.open("rb") as stream:
        first = stream.readline(END)
        size = stream.seek(0, 2)
        # What stands before the first line break belongs to a line that is not whole, or is nothing.
        stream.seek(max(0, len(first) - 1, size - END))
        lines = [first, *stream.read(END).split(b"\n")[1:-1]]
    file.take(value for line in lines if isinstance(value := _parsed(line), dict))
    file.tail.damaged = 0
    file.tail.offset = size
    return file


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _state(path: Path) -> State:
    facts = path.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


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
        self._end = b""
        """The last bytes that were read."""
        self._skipping = False

    def replaced(self) -> bool:
        """Whether the file was replaced, deleted or written again in place, as scp does; then everything
        read from it is void."""
        try:
            stat = self.path.stat()
        except OSError:
            identity = None
            size = 0
        else:
            identity = (stat.st_dev, stat.st_ino)
            size = stat.st_size
        other = self._identity is not None and (
            identity != self._identity or size < self.offset or not self._goes_on()
        )
        if other:
            self.offset = 0
            self.damaged = 0
            self._rest = b""
            self._end = b""
            self._skipping = False
            self.generation += 1
        self._identity = identity
        return other

    def _goes_on(self) -> bool:
        """Whether the bytes before the position are those that were read."""
        if not self._end:
            return True
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._end))
            return file.read(len(self._end)) == self._end

    def new(self) -> Iterator[dict[str, object]]:
        """The objects in the lines that were added."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while piece := file.read(CHUNK_BYTES):
                self.offset += len(piece)
                self._end = piece[-COMPARED:]
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
