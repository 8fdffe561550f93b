"""Activation offload: activations are kept in host memory until the backward pass
(model.enable_activation_offload).

On a GPU, a tensor is copied to pinned memory on a separate stream while the GPU continues to compute. The
tensor stays on the device until later tensors are being copied: then the compute stream waits for its copy,
and its memory can be reused. So the memory of a pass does not depend on how far the host is ahead of the GPU.
The backward pass needs tensors in the reverse order: when it needs one, the copies of the tensors before it
have already been started.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from strop.backends.offload import is_weight

log = logging.getLogger(__name__)

SMALL = 4096
"""Tensors with fewer numbers stay on the device."""
PREFETCH_BYTES = 1 << 29
"""Bytes of tensors that are on their way to the host, or copied back before they are asked for.
`planning/training.py` counts them."""


class Copier(Protocol):
    """Copies between device and host memory."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy to host memory."""
        ...

    def to_device(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy back: the tensor, and when it has its values."""
        ...


class LeavingTensors:
    """Tensors whose copies to the host have begun, and which stay on the device until a copy is waited for:
    the newest, and as many before it as take `most_bytes` together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tensors: deque[tuple[Tensor, Callable[[], None]]] = deque()
        self._bytes = 0

    def add(self, tensor: Tensor, wait: Callable[[], None]) -> None:
        """`wait`: let the computation wait for the copy."""
        self._tensors.append((tensor, wait))
        self._bytes += tensor.nbytes
        while len(self._tensors) > 1 and self._bytes > self._most_bytes:
            self._drop()

    def clear(self) -> None:
        while self._tensors:
            self._drop()

    def _drop(self) -> None:
        tensor, wait = self._tensors.popleft()
        wait()
        self._bytes -= tensor.nbytes


class StreamCopier:
    """Copies on a GPU, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)
        self._leaving = LeavingTensors(PREFETCH_BYTES)

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving.add(tensor, self._stream.record_event().wait)
        return host

    def to_device(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        self._leaving.clear()  # the forward pass is over
        # Kernels that were launched on the current stream may still read what was in this memory before.
        tensor = torch.empty_like(host, device=self._device, pin_memory=False)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        return tensor, self._stream.record_event()


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all offloaded activations of a device."""
    return torch.cuda.Stream(device)


@dataclass(eq=False)
class Waiting:
    """A tensor in host memory."""

    place: int
    """Counts the tensors of a pass."""
    host: Tensor
    uses: int = 1
    """How often the backward pass will ask for it."""
    device: Tensor | None = None
    """Its copy on the device, from the start of the copy to its last use."""
    ready: torch.cuda.Event | None = None
    """When the copy is done."""

    def __del__(self) -> None:
        """A pass that failed leaves copies that were not asked for: their memory is not used before they are
        done."""
        if self.device is not None and self.ready is not None:
            self.ready.wait()


@dataclass
class ActivationOffload:
    """The hooks of one forward pass and its backward pass. A tensor that several operations keep is copied
    once."""

    copier: Copier
    small: int = SMALL
    prefetch_bytes: int = PREFETCH_BYTES
    _waiting: list[Waiting | None] = field(default_factory=list)
    """By place; None: used up."""
    _known: dict[tuple[object, ...], tuple[StorageWeakRef, Waiting]] = field(default_factory=dict)
    """Tensors that exist on the device and were copied."""

    def hooks(self) -> AbstractContextManager[object]:
        """Around the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | Waiting:
        storage = tensor.untyped_storage()
        dense = tensor.is_contiguous() or tensor.nbytes == storage.nbytes()
        if is_weight(tensor) or tensor.numel() < self.small or not dense:
            return tensor
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage._cdata, tensor._version, *layout)
        known = self._known.get(key)
        if known is not None and not known[0].expired():
            known[1].uses += 1
            return known[1]
        waiting = Waiting(len(self._waiting), self.copier.to_host(tensor))
        self._waiting.append(waiting)
        self._known[key] = (StorageWeakRef(storage), waiting)
        return waiting

    def unpack(self, packed: Tensor | Waiting) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._known.clear()  # the forward pass is over
        self._start(packed)
        tensor = packed.device
        assert tensor is not None
        if packed.ready is not None:
            packed.ready.wait()  # the current stream does, not the host
        packed.uses -= 1
        if packed.uses == 0:
            packed.device = None
            self._waiting[packed.place] = None
        self._prefetch(packed.place)
        return tensor

    def _start(self, waiting: Waiting) -> None:
        if waiting.device is None:
            waiting.device, waiting.ready = self.copier.to_device(waiting.host)

    def _prefetch(self, place: int) -> None:
        """Start to copy the tensors before this one, as many as may be on the device ahead of their use."""
        room = self.prefetch_bytes
        for waiting in reversed(self._waiting[:place]):
            if waiting is None:
                continue
            room -= waiting.host.nbytes
            if room < 0:
                return
            self._start(waiting)


def saved_activations(device: torch.device) -> AbstractContextManager[object]:
    """Around a forward pass: its activations wait for the backward pass in host memory."""
    if device.type != "cuda":
        _log_no_effect(device.type)
        return contextlib.nullcontext()
    return ActivationOffload(StreamCopier(device)).hooks()


@cache
def _log_no_effect(device: str) -> None:
    log.warning("enable_activation_offload has no effect on %s: activations are in host memory.", device)
