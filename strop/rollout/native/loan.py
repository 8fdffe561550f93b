"""The module on loan from the trainer: in rollout dress for as long as anybody in the engine needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from strop.rollout.native.dress import Changes, on_loan
from strop.rollout.native.packed import Packed


class Loan:
    def __init__(self, model: Any, lock: threading.RLock, on_change: Callable[[], None]) -> None:
        """`on_change` is called at the beginning of a loan when the weights are not those of the last one."""
        self._model, self._lock, self._on_change = model, lock, on_change
        self._borrowers, self._stack = 0, ExitStack()
        self._changes: Changes | None = None
        self.packed = Packed(model)
        self._seen: tuple[tuple[int, int], ...] = ()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._borrowers == 0:
                self._take()
            self._borrowers += 1
        try:
            yield
        finally:
            with self._lock:
                self._borrowers -= 1
                if self._borrowers == 0:
                    self._seen = _fingerprint(self._model)
                    self.packed.take_off()
                    self._stack.close()

    def _take(self) -> None:
        if self._changes is None:
            self._changes = Changes(self._model)
        self._stack.enter_context(on_loan(self._model, self._changes))
        if self._seen and self._seen != _fingerprint(self._model):
            self._on_change()
        self.packed.put_on()


def _fingerprint(model: Any) -> tuple[tuple[int, int], ...]:
    """Where each weight lies and how often it was written to: whoever trains the module need not tell the engine."""
    return tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
