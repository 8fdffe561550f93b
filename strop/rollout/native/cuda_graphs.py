"""Decode steps as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from strop.rollout.native.attention import Cache
from strop.rollout.native.decode_rows import Features
from strop.rollout.native.kv_cache import kernels

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_GRAPH_LENGTH = 128
"""CUDA graphs are recorded for multiples of this length."""


class Steps(Protocol):
    """What computes a decode step."""

    def step(self, count: int, spans: Sequence[tuple[int, int, int]], used: Features) -> None: ...


def graph_rows(rows: int, limit: int) -> int:
    """The number of rows of the CUDA graph for `rows`. Idle rows cost little while a step is bound by reading
    the weights, up to about 128 rows; above, products take time in proportion, so sizes are closer."""
    size = 1
    while size < rows:
        size *= 2
    if size > 128:
        step = size // 8
        size = -(-rows // step) * step
    elif size > 16 and rows <= size * 3 // 4:
        size = size * 3 // 4
    return min(size, limit)


class CudaGraphs:
    """Decode steps as CUDA graphs: one per number of rows, used length and set of sampling features.

    A graph replaces thousands of kernel launches by one. If the module cannot be recorded (its forward pass
    synchronizes with the device), steps run eagerly, and a warning says so once.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        self._refused = False
        self._weights: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drop all graphs: they point at tensors that are about to be freed."""
        self._graphs.clear()
        self._pool = None

    def check(self, model: nn.Module) -> None:
        """Drop all graphs if weights have moved: offloaded and onloaded, or replaced."""
        addresses = tuple(weight.data_ptr() for weight in model.parameters())
        if addresses != self._weights:
            self.clear()
            self._weights = addresses

    def step(self, runner: Steps, cache: Cache, rows: int, longest: int, used: Features) -> None:
        """One decode step: replay its graph, or record it."""
        if self._refused:
            runner.step(rows, [(0, rows, longest)], used)
            return
        rows = graph_rows(rows, cache.rows)
        fast = kernels("cuda")
        if fast is not None and not used["penalty"]:
            longest = fast.padded_length(longest)  # the kernels read only what is used
        longest = min(-(-longest // _GRAPH_LENGTH) * _GRAPH_LENGTH, cache.capacity)
        key = (rows, longest, *used.items())
        if key not in self._graphs:
            # The first step with this key runs eagerly, which also warms up what must not be recorded.
            runner.step(rows, [(0, rows, longest)], used)
            self._record(key, runner, rows, longest, used)
            return
        self._graphs[key].replay()

    def _record(
        self, key: tuple[object, ...], runner: Steps, rows: int, longest: int, used: Features
    ) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # thread_local: a trainer in another thread may allocate memory at the same time.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                runner.step(rows, [(0, rows, longest)], used)
        except RuntimeError as error:
            self._refused = True
            warnings.warn(
                f"CUDA graphs are off for this model: recording a decode step failed ({error}).", stacklevel=2
            )
            return
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
