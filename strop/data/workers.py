"""Processes that hold a copy of a data set and work on parts of it, in order."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any

AHEAD = 2  # batches under way for each process


class Workers:
    """`count` processes; what they run is `function(dataset, argument)`, a function of a module."""

    def __init__(self, dataset: Any, count: int):
        self.count = count
        self._pool = ProcessPoolExecutor(count, mp_context=_context(), initializer=_receive, initargs=(dataset,))

    def submit(self, function: Callable[[Any, Any], Any], argument: Any) -> Future[Any]:
        return self._pool.submit(_call, function, argument)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Ahead:
    """Batches made before they are asked for; order and content are the same as without."""

    def __init__(self, dataset: Sequence[Any], workers: int):
        self.depth = workers * AHEAD
        self._workers = Workers(dataset, workers)
        self._waiting: deque[tuple[list[int], Future[list[Any]]]] = deque()

    def take(self, places: list[int], following: list[list[int]]) -> list[Any]:
        """The items at `places`; those of `following`, the batches right after it, are begun."""
        while self._waiting and self._waiting[0][0] != places:
            self._waiting.popleft()[1].cancel()
        for batch in [places, *following][len(self._waiting) :]:
            self._waiting.append((batch, self._workers.submit(items, batch)))
        return self._waiting.popleft()[1].result()

    def close(self) -> None:
        self._workers.close()


def items(dataset: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [dataset[place] for place in places]


def _context() -> BaseContext:
    """No forks of this process: tokenizers and torch run threads, which do not survive one. A server that has imported what
    workers need and done nothing else is forked instead, where there are forks: seconds and memory are spent once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["strop.data.prompts", "transformers.models.auto.tokenization_auto"])
    return context


_dataset: list[Any] = []  # of a worker process


def _receive(dataset: Any) -> None:
    _dataset[:] = [dataset]


def _call(function: Callable[[Any, Any], Any], argument: Any) -> Any:
    return function(_dataset[0], argument)
