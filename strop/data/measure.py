"""How long prompts are, measured by several processes if asked, with a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from strop.data.workers import Workers

CHUNK = 256


class Measurable(Protocol):
    def __len__(self) -> int: ...

    def lengths(self, places: Sequence[int] | None = None) -> list[int]: ...


def measure(dataset: Measurable, *, workers: int = 1) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of every prompt, in order. The number of `workers` changes nothing but the time."""
    chunks = [range(start, min(start + CHUNK, len(dataset))) for start in range(0, len(dataset), CHUNK)]
    if workers <= 1 or len(chunks) == 1:
        parts: Iterable[list[int]] = map(dataset.lengths, chunks)
        return _gather(parts, len(dataset))
    with Workers(dataset, min(workers, len(chunks))) as pool:
        futures = [pool.submit(_lengths, chunk) for chunk in chunks]
        return _gather((future.result() for future in futures), len(dataset))


def _gather(parts: Iterable[list[int]], count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray([length for part in _with_progress(parts, count) for length in part], dtype=np.int64)


def _with_progress(parts: Iterable[list[int]], count: int) -> Iterator[list[int]]:
    if not sys.stderr.isatty():
        yield from parts
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Measuring prompts", total=count)
        for part in parts:
            progress.advance(task, len(part))
            yield part


def _lengths(dataset: Measurable, places: range) -> list[int]:
    return dataset.lengths(places)
