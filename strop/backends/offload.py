"""Offload: parts of a model are kept in host memory while other models use the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Offloadable(Protocol):
    """What can move a model and its optimizer to host memory and back."""

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None: ...

    def onload(self, *, model: bool = True, optimizer: bool = True) -> None: ...


class Offloading:
    """Onloads what a pass needs, and offloads it after the pass, or after the last update of a step."""

    def __init__(self, backend: Offloadable, *, model: bool = False, optimizer: bool = False):
        """Whether the module waits in host memory, and whether master weights and optimizer state do."""
        self._backend = backend
        self._model = model
        self._optimizer = optimizer
        self._updating = False

    def offload(self) -> None:
        """Move everything to host memory: the updates of a step are over."""
        self._updating = False
        self._backend.offload(model=self._model, optimizer=self._optimizer)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """The module on the device, inside the block."""
        if self._updating or not self._model:
            yield
            return
        self._backend.onload(model=True, optimizer=False)
        try:
            yield
        finally:
            self._backend.offload(model=True, optimizer=False)

    def begin_update(self) -> None:
        """Everything on the device, until `offload`."""
        if not self._updating:
            self._backend.onload(model=self._model, optimizer=self._optimizer)
        self._updating = True


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor that waits for the backward pass is a weight, or a view of one. Gathered shards are
    weights too."""
    return isinstance(tensor, nn.Parameter | DTensor) or isinstance(tensor._base, nn.Parameter | DTensor)
