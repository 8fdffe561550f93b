"""An engine that can be stopped in the middle of its requests and go on later, also under other weights.

Whoever asked notices nothing but the time: answers that a stop cut short are continued, and come back whole, with the version
of the weights that sampled each stretch. It works with any engine, because all it needs is `abort`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from strop.rollout.base import Completion, Engine, EngineDied, Request, Sampling
from strop.rollout.partial import continuation, joined

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

LOOK_AGAIN_SECONDS = 0.02
"""Between two calls of abort: a request that was handed over just after the first one must end too."""
KNOCK_SECONDS = 0.01
"""Between two looks of a coroutine at a door that is shut."""


class Ended(RuntimeError):
    """The run is over: nothing more is asked of the engine."""


class Interruptible:
    def __init__(self, engine: Engine, *, cut: bool) -> None:
        """`cut`: a stop aborts what is running, which goes on afterwards with what it has; else a stop waits for its end."""
        self.engine, self.cut = engine, cut
        self._changed = threading.Condition()
        self._open, self._ended, self._inside = True, False, 0

    # --- stop and go -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let nobody ask any more, and return when nothing is running."""
        with self._changed:
            self._open = False
        while True:
            if self.cut or self._ended:
                self.engine.abort()
            with self._changed:
                if self._inside == 0:
                    return
                self._changed.wait(LOOK_AGAIN_SECONDS)

    def go(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.go()

    def end(self) -> None:
        """Abort what is running; those who ask, now or later, get `Ended`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with suppress(EngineDied):
            self.engine.abort()

    # --- the protocol ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        answers = self._inside_of(lambda: self.engine.generate(requests, sampling))
        while places := self._cut_short(answers):
            more = self._continuations(requests, sampling, answers, places)
            _join(answers, places, self._inside_of(lambda more=more: self.engine.generate(more, sampling)))  # type: ignore[misc]
        return answers

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        async def ask(wanted: Sequence[Request]) -> list[list[Completion]]:
            while not self._enter(wait=False):
                await asyncio.sleep(KNOCK_SECONDS)
            try:
                return list(await asyncio.gather(*(self.engine.agenerate(one, sampling) for one in wanted)))
            finally:
                self._leave()

        answers = await ask([request])
        while places := self._cut_short(answers):
            _join(answers, places, await ask(self._continuations([request], sampling, answers, places)))
        return answers[0]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.stopped():
            self.engine.update_weights(weights, version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def abort(self) -> None:
        self.engine.abort()

    def stats(self) -> Mapping[str, float]:
        return self.engine.stats()

    def close(self) -> None:
        self.end()
        self.engine.close()

    # --- the door --------------------------------------------------------------------------------------------------------

    def _inside_of(self, ask: Callable[[], T]) -> T:
        self._enter(wait=True)
        try:
            return ask()
        finally:
            self._leave()

    def _enter(self, *, wait: bool) -> bool:
        with self._changed:
            while wait and not self._open and not self._ended:
                self._changed.wait()
            if self._ended:
                raise Ended("The rollout engine was closed while it was asked for more.")
            if self._open:
                self._inside += 1
            return self._open

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _cut_short(self, answers: Sequence[Sequence[Completion]]) -> list[tuple[int, int]]:
        """(request, sample) of what a stop has interrupted."""
        if not self.cut and not self._ended:
            return []
        return [(i, j) for i, found in enumerate(answers) for j, one in enumerate(found) if one.finish == "abort"]

    def _continuations(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        answers: Sequence[Sequence[Completion]],
        places: Sequence[tuple[int, int]],
    ) -> list[Request]:
        same = bool(getattr(self.engine, "same_stream", False))

        def most(request: Request) -> int:
            return sampling.max_tokens if request.max_tokens is None else request.max_tokens

        return [continuation(requests[i], j, answers[i][j], most(requests[i]), same_stream=same) for i, j in places]


def _join(answers: list[list[Completion]], places: Sequence[tuple[int, int]], more: Sequence[Sequence[Completion]]) -> None:
    for (i, j), [one] in zip(places, more, strict=True):
        answers[i][j] = joined(answers[i][j], one)
