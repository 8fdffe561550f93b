"""Worker processes with a copy of a data set: they prefetch batches, and measure prompts in parallel.

They end with the process that started them, however it ends.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from strop.registry import load_module, user_files

log = logging.getLogger(__name__)
PREFETCH_PER_WORKER = 2  # batches
CHUNK = 256  # prompts that are measured together

Dataset = TypeVar("Dataset")
Argument = TypeVar("Argument")
Result = TypeVar("Result")
Item = TypeVar("Item")


class DatasetWorkers(Generic[Dataset]):
    """`count` processes that run `function(dataset, argument)`; the function must be defined in a module."""

    def __init__(self, dataset: Dataset, count: int):
        self.count = count
        self._pool = ProcessPoolExecutor(
            count, mp_context=_context(), initializer=_begin_worker, initargs=(_Shipped(dataset),)
        )

    def submit(self, function: Callable[[Dataset, Argument], Result], argument: Argument) -> Future[Result]:
        """Start a call in one of the processes."""
        return self._pool.submit(_call, function, argument)

    def close(self) -> None:
        """Stop the processes; calls that have not started are cancelled."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> DatasetWorkers[Dataset]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Prefetcher(Generic[Item]):
    """Prepares batches ahead of time; their order and content are the same as without it."""

    def __init__(self, dataset: Sequence[Item], workers: int):
        self.dataset = dataset
        self.depth = workers * PREFETCH_PER_WORKER
        self._workers: DatasetWorkers[Sequence[Item]] = DatasetWorkers(dataset, workers)
        self._pending: deque[tuple[list[int], Future[list[Item]]]] = deque()
        self._broken = False

    def take(self, indices: list[int], following: list[list[int]]) -> list[Item]:
        """Return the items at `indices`, and start the batches of `following`, which come next.

        Without its workers, this process prepares them: a scheduler that ends a run may signal every process
        of it, and the run must still finish its step and save.
        """
        if not self._broken:
            try:
                return self._prepared(indices, following)
            except BrokenProcessPool:
                self._broken = True
                log.warning(
                    "A process of data.dataloader_num_workers was ended (by a signal, or for lack of "
                    "memory). The batches are prepared by the trainer from now on, which is slower."
                )
        return get_items(self.dataset, indices)

    def _prepared(self, indices: list[int], following: list[list[int]]) -> list[Item]:
        while self._pending and self._pending[0][0] != indices:
            self._pending.popleft()[1].cancel()
        for batch in [indices, *following][len(self._pending) :]:
            self._pending.append((batch, self._workers.submit(get_items, batch)))
        return self._pending.popleft()[1].result()

    def close(self) -> None:
        """Stop the worker processes."""
        self._workers.close()


def get_items(dataset: Sequence[Item], indices: Sequence[int]) -> list[Item]:
    """Return the items at `indices`."""
    return [dataset[index] for index in indices]


def _context() -> BaseContext:
    """Return how processes start: never by a fork of this one, whose tokenizer and torch threads would be
    lost.

    Where forks exist, a fork server imports what workers need once and is forked instead.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["strop.data.prompts", "transformers.models.auto.tokenization_auto"])
    return context


_worker_dataset: list[object] = []  # in a worker process: its data set


class _Shipped:
    """A data set on its way to a worker. Its class may be in a user's file, which the worker imports."""

    def __init__(self, dataset: object):
        self.dataset = dataset

    def __reduce__(self) -> tuple[Callable[..., object], tuple[dict[str, str], bytes]]:
        return _unpack, (user_files(), pickle.dumps(self.dataset))


class _Unpickler(pickle.Unpickler):
    """Imports the user's files that a pickle names."""

    def __init__(self, data: bytes, files: Mapping[str, str]):
        super().__init__(io.BytesIO(data))
        self.files = files

    def find_class(self, module: str, name: str) -> Any:
        if module in self.files:
            load_module(self.files[module])
        return super().find_class(module, name)


def _unpack(files: Mapping[str, str], data: bytes) -> object:
    return _Unpickler(data, files).load()


def _begin_worker(dataset: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which still needs its batches
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _worker_dataset[:] = [dataset]


def _end_with_parent() -> None:
    """A killed process cannot stop its workers, which would keep their memory for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _call(function: Callable[[Dataset, Argument], Result], argument: Argument) -> Result:
    return function(cast(Dataset, _worker_dataset[0]), argument)


# --- Prompt lengths -----------------------------------------------------------------------------------------


class MeasurablePrompts(Protocol):
    """A data set of prompts that knows their lengths in tokens."""

    def __len__(self) -> int: ...

    def lengths(self, indices: Sequence[int] | None = None) -> list[int]: ...


def measure_prompts(dataset: MeasurablePrompts, *, workers: int = 1) -> NDArray[np.int64]:
    """Return the number of tokens of every prompt, with a progress bar; `workers` changes only the time."""
    chunks = [range(start, min(start + CHUNK, len(dataset))) for start in range(0, len(dataset), CHUNK)]
    if workers <= 1 or len(chunks) == 1:
        return _concatenate(map(dataset.lengths, chunks), len(dataset))
    with DatasetWorkers(dataset, min(workers, len(chunks))) as pool:
        futures = [pool.submit(_chunk_lengths, chunk) for chunk in chunks]
        return _concatenate((future.result() for future in futures), len(dataset))


def _concatenate(parts: Iterable[list[int]], count: int) -> NDArray[np.int64]:
    lengths: list[int] = []
    for part in _with_progress(parts, count):
        lengths += part
    return np.asarray(lengths, dtype=np.int64)


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


def _chunk_lengths(dataset: MeasurablePrompts, chunk: range) -> list[int]:
    return dataset.lengths(chunk)
