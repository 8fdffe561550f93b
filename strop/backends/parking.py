"""Parts of a model that wait in host memory while others use the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Movable(Protocol):
    def offload(self, *, model: bool = True, optimizer: bool = True) -> None: ...

    def onload(self, *, model: bool = True, optimizer: bool = True) -> None: ...


class Parking:
    """Brings what a pass needs to the device, and parks it again when the pass, or the last update of a step, is over."""

    def __init__(self, backend: Movable, *, model: bool = False, optimizer: bool = False):
        """Whether the module rests in host memory, and whether masters and optimizer do."""
        self._backend, self._model, self._optimizer = backend, model, optimizer
        self._updating = False

    def park(self) -> None:
        self._updating = False
        if self._model or self._optimizer:
            self._backend.offload(model=self._model, optimizer=self._optimizer)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a forward pass."""
        if self._updating or not self._model:
            yield
            return
        self._backend.onload(model=True, optimizer=False)
        try:
            yield
        finally:
            self._backend.offload(model=True, optimizer=False)

    def begin_update(self) -> None:
        """Everything is needed from here on, until it is parked."""
        if not self._updating and (self._model or self._optimizer):
            self._backend.onload(model=self._model, optimizer=self._optimizer)
        self._updating = True
