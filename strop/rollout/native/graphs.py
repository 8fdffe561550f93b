"""Decode steps as CUDA graphs: one per batch-size bucket, used length and set of sampling features.

Recording replaces thousands of kernel launches by one. Where the module cannot be recorded (it asks the device something in
the middle of its forward pass), steps run one by one, and a warning says so once.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from strop.rollout.native.accelerated import kernels

if TYPE_CHECKING:
    from strop.rollout.native.runner import Runner

_LENGTH = 128


def bucket(rows: int, most: int) -> int:
    """The number of rows that a graph for `rows` computes: powers of two, and half-way points from 16 on."""
    size = 1
    while size < rows:
        size *= 2
    middle = size * 3 // 4
    if size > 16 and rows <= middle:
        size = middle
    return min(size, most)


class Graphs:
    def __init__(self) -> None:
        self._recorded: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._refused = False
        self._weights: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._recorded)

    def clear(self) -> None:
        """Forget all recordings: they point at tensors that are about to go."""
        self._recorded.clear()
        self._pool = None

    def check(self, model: Any) -> None:
        """Forget recordings that read weights which have moved: offloaded and back, or replaced."""
        places = tuple(weight.data_ptr() for weight in model.parameters())
        if places != self._weights:
            self.clear()
            self._weights = places

    def step(self, runner: Runner, rows: int, longest: int, used: dict[str, bool | int]) -> None:
        if self._refused:
            runner.step(rows, [(0, rows, longest)], used)
            return
        rows = bucket(rows, runner.cache.rows)
        if kernels("cuda") is not None and not used["penalty"]:
            longest = runner.cache.capacity  # the kernels read what is used, whatever the longest row
        longest = min(-(-longest // _LENGTH) * _LENGTH, runner.cache.capacity)
        key = (rows, longest, *used.items())
        if key not in self._recorded:
            # The first step with this key runs as it is, which also warms up what must not be recorded.
            runner.step(rows, [(0, rows, longest)], used)
            self._record(key, runner, rows, longest, used)
            return
        self._recorded[key].replay()

    def _record(self, key: tuple[object, ...], runner: Runner, rows: int, longest: int, used: dict[str, bool | int]) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # thread_local: a trainer in another thread may take memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                runner.step(rows, [(0, rows, longest)], used)
        except RuntimeError as error:
            self._refused = True
            warnings.warn(f"CUDA graphs are off for this model: recording a decode step failed ({error}).", stacklevel=2)
            return
        self._pool = self._pool or graph.pool()
        self._recorded[key] = graph
