"""Wraps an engine so that it can be paused in the middle of its requests and resumed, also under new weights.

Completions that a pause cuts short are continued and returned whole, with the span of each weight version.
The caller only notices the time. It works with any engine, because it only needs `abort`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from strop.rollout.base import (
    Completion,
    Engine,
    EngineDied,
    MoreRequests,
    OnTokens,
    Request,
    Sampling,
    completion_limit,
    refuse_more,
)
from strop.rollout.continuation import continuation, join_completions

if TYPE_CHECKING:
    import torch

    from strop.rollout.base import NamedWeights

T = TypeVar("T")

ABORT_RETRY_SECONDS = 0.02
"""Between two calls of abort: a request that was submitted just after the first call must end too."""
PAUSE_POLL_SECONDS = 0.01
"""Interval in which a coroutine checks whether the engine is still paused."""


class EndedRequest(RuntimeError):
    """The run is over: the engine takes no more requests."""


class Interruptible:
    def __init__(self, engine: Engine, *, cut: bool) -> None:
        """`cut`: `stop` aborts running requests, which are continued after `go`; else `stop` waits until they
        finish."""
        self.engine = engine
        self.cut = cut
        self._changed = threading.Condition()
        self._open = True
        self._ended = False
        self._num_running = 0
        """Calls that are inside the engine now."""

    # --- pause and resume -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Admit no more requests, and return when nothing is running."""
        with self._changed:
            self._open = False
        while True:
            if self.cut or self._ended:
                self.engine.abort()
            with self._changed:
                if self._num_running == 0:
                    return
                self._changed.wait(ABORT_RETRY_SECONDS)

    def go(self) -> None:
        """Admit requests again."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Paused within the context."""
        self.stop()
        try:
            yield
        finally:
            self.go()

    def end(self) -> None:
        """Abort running requests; these and all later ones raise EndedRequest."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with suppress(EngineDied):
            self.engine.abort()

    # --- the engine protocol --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    @property
    def same_stream(self) -> bool:
        return self.engine.same_stream

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: MoreRequests | None = None
    ) -> list[list[Completion]]:
        refuse_more(self, more)
        results = self._admitted(partial(self.engine.generate, requests, sampling))
        while places := self._cut_short(results):
            rest = self._continuations(requests, sampling, results, places)
            _join(results, places, self._admitted(partial(self.engine.generate, rest, sampling)))
        return results

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        results = await self._agenerate_all([request], sampling)
        while places := self._cut_short(results):
            rest = self._continuations([request], sampling, results, places)
            _join(results, places, await self._agenerate_all(rest, sampling))
        return results[0]

    async def _agenerate_all(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        while not self._enter(wait=False):
            await asyncio.sleep(PAUSE_POLL_SECONDS)
        try:
            calls = [self.engine.agenerate(request, sampling) for request in requests]
            return list(await asyncio.gather(*calls))
        finally:
            self._leave()

    def update_weights(self, weights: NamedWeights, version: int) -> None:
        with self.stopped():
            self.engine.update_weights(weights, version)

    def use_stream(self, stream: torch.cuda.Stream | None) -> None:
        self.engine.use_stream(stream)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def release_memory(self) -> bool:
        return self.engine.release_memory()

    def abort(self) -> None:
        self.engine.abort()

    def stats(self) -> Mapping[str, float]:
        return self.engine.stats()

    def close(self) -> None:
        self.end()
        self.engine.close()

    # --- admission ------------------------------------------------------------------------------------------

    def _admitted(self, call: Callable[[], T]) -> T:
        self._enter(wait=True)
        try:
            return call()
        finally:
            self._leave()

    def _enter(self, *, wait: bool) -> bool:
        """Whether the call was admitted; with `wait`, blocks until it is."""
        with self._changed:
            while wait and not self._open and not self._ended:
                self._changed.wait()
            if self._ended:
                raise EndedRequest("The rollout engine was closed while it was asked for more.")
            if self._open:
                self._num_running += 1
            return self._open

    def _leave(self) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def _cut_short(self, results: Sequence[Sequence[Completion]]) -> list[tuple[int, int]]:
        """(request, sample) of each completion that a pause has aborted."""
        places: list[tuple[int, int]] = []
        if not self.cut and not self._ended:
            return places
        for i, completions in enumerate(results):
            for j, completion in enumerate(completions):
                if completion.finish == "abort":
                    places.append((i, j))
        return places

    def _continuations(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        results: Sequence[Sequence[Completion]],
        places: Sequence[tuple[int, int]],
    ) -> list[Request]:
        rest = []
        for i, j in places:
            limit = completion_limit(requests[i], sampling)
            part = continuation(requests[i], j, results[i][j], limit, same_stream=self.engine.same_stream)
            rest.append(replace(part, on_tokens=_as_sample(j, part.on_tokens)))
        return rest


def _as_sample(sample: int, on_tokens: OnTokens | None) -> OnTokens | None:
    """The callback of a request, for the request that continues one of its samples."""
    if on_tokens is None:
        return None
    return lambda _, ids, log_probs: on_tokens(sample, ids, log_probs)


def _join(
    results: list[list[Completion]],
    places: Sequence[tuple[int, int]],
    continued: Sequence[Sequence[Completion]],
) -> None:
    for (i, j), [completion] in zip(places, continued, strict=True):
        results[i][j] = join_completions(results[i][j], completion)
