"""Who may use the model: many samples at once, or one training operation alone.

The engine and the trainer share one module, so a pass of training must not run while the engine samples.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Gate:
    """Admits samples together; a training operation waits for them, and they for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sampling: Counter[asyncio.AbstractEventLoop] = Counter()
        self._training: int | None = None
        """The thread of the training operation."""
        self._trainers_waiting = 0
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.closed = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Alone in the block. Samples that come later wait."""
        with self._changed:
            self._refuse_nested()
            self._refuse_own_loop()
            self._trainers_waiting += 1
            try:
                self._changed.wait_for(lambda: self._training is None and not self._sampling)
                self._refuse_closed()
                self._training = threading.get_ident()
            finally:
                self._trainers_waiting -= 1
                if self._training is None:  # interrupted: samples that waited for this operation may begin
                    self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._training = None
                self._wake()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """In the block with other samples."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                self._refuse_nested()
                self._refuse_closed()
                if self._training is None and not self._trainers_waiting:
                    self._sampling[loop] += 1
                    break
                sleeper: asyncio.Future[None] = loop.create_future()
                self._sleepers.append((loop, sleeper))
            await sleeper
        try:
            yield
        finally:
            with self._changed:
                self._sampling[loop] -= 1
                if not self._sampling[loop]:
                    del self._sampling[loop]  # a closed event loop must not be kept
                if not self._sampling:
                    self._wake()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Alone in the block, and nothing is admitted afterwards."""
        with self.training():
            self.closed = True
            yield

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ValueError(
                "The policy is closed: its engine is gone, and a loaded model belongs to its owner again. "
                "Make a new Policy; save_state before close, and load_state, carry the training over."
            )

    def _wake(self) -> None:
        self._changed.notify_all()
        sleepers = self._sleepers
        self._sleepers = []
        for loop, sleeper in sleepers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_finish, sleeper)

    def _refuse_nested(self) -> None:
        """Refuse an operation inside another one, for which it would wait."""
        if self._training == threading.get_ident():
            raise ValueError(
                "An operation of the policy was called inside another one, by a loss function: it could "
                "never begin. Call it before, and use its result in the function."
            )

    def _refuse_own_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # this thread runs no event loop
            return
        if loop in self._sampling:
            raise ValueError(
                "A training operation was called in an event loop whose samples are still running: they "
                "could never finish. Await them first, or await the operation in another thread: "
                "await asyncio.to_thread(policy.forward_backward, ...)."
            )


def _finish(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
