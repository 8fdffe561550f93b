"""The experts of every token that the native engine computes (router_replay.mode=R3).

They are stored in the KV cache, with the keys of the token. What copies, shares, moves or replaces the keys
of a token does the same with its experts: prefix caching, prefill in chunks, rows with equal tokens, pages,
drafts that were rejected, preemption. A decode step writes them at fixed addresses, so a CUDA graph records
that too. They are copied to the host once, when a sample finishes or is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from strop.models.layouts.routing import ModelRouting, routing_of
from strop.rollout.native.attention import Cache
from strop.rollout.native.kv_cache import CacheTensors
from strop.rollout.native.quantization.cache import ShortTensors
from strop.rollout.native.requests import ScheduledSample

_BYTE = 256
"""Experts that a byte can number."""


class RecordedTensors(CacheTensors):
    """Keys and values, and the experts of each token in all layers."""

    def __init__(
        self,
        layers: Mapping[int, tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        routing: ModelRouting,
    ) -> None:
        super().__init__(layers, dtype, device)
        self.routing = routing
        self._number = torch.uint8 if routing.experts <= _BYTE else torch.int16
        self._table = torch.zeros(0, 1, 0, self._size, dtype=self._number, device=device)
        """[places, 1, positions, layers * k], with the axes of keys."""

    @property
    def _size(self) -> int:
        layers, count = self.routing.shape
        return layers * count

    @property
    def all(self) -> list[Tensor]:
        return [*super().all, self._table]

    @property
    def bytes_per_token(self) -> int:
        return super().bytes_per_token + self._size * self._number.itemsize

    def resize(self, places: int, positions: int, keep: int) -> None:
        super().resize(places, positions, keep)
        old = self._table
        self._table = torch.zeros(places, 1, positions, self._size, dtype=self._number, device=self.device)
        length = min(positions, old.shape[2])
        self._table[:keep, :, :length] = old[:keep, :, :length]

    def free(self) -> None:
        super().free()
        self._table = self._table.new_zeros(0, 1, 0, self._size)

    def write_experts(self, slots: tuple[Tensor, Tensor], chosen: Tensor) -> None:
        """Experts [N, layers, k], entry i to its slot."""
        self._table[slots[0], 0, slots[1]] = chosen.flatten(1).to(self._number)

    def read_experts(self, slots: tuple[Tensor, Tensor]) -> np.ndarray:
        """Experts [N, layers, k] of these slots, on the host."""
        found = self._table[slots[0], 0, slots[1]].unflatten(1, self.routing.shape)
        numbers: np.ndarray = found.cpu().numpy()
        return numbers


class ShortRecordedTensors(RecordedTensors, ShortTensors):
    """The same with keys and values in 8 bits."""


class ExpertRecorder:
    """Makes the routers of a model note what they choose in the passes of the engine, and stores it."""

    def __init__(self, model: nn.Module) -> None:
        self._routing = routing_of(model)

    def tensors(self, *, short: bool) -> Callable[..., CacheTensors]:
        """What makes the tensors of the cache."""
        return partial(ShortRecordedTensors if short else RecordedTensors, routing=self._routing)

    def begin(self) -> None:
        """Before a pass. The trainer's passes over the same module in between have their own settings."""
        for layer in self._routing.layers:
            layer.end()
            layer.records = True

    def store(self, cache: Cache, slots: tuple[Tensor, Tensor], group: Tensor | None = None) -> None:
        """After a pass over the tokens of these slots. `group`: the token of the pass that each slot
        holds; None: they are the same."""
        noted = []
        for layer in self._routing.layers:
            assert layer.noted is not None, "every router was called"
            noted.append(layer.noted)
            layer.end()
        chosen = torch.stack(noted, 1)
        if group is not None:
            chosen = chosen[group]
        tensors = cache.tensors
        assert isinstance(tensors, RecordedTensors)
        tensors.write_experts(slots, chosen)

    def read(self, cache: Cache, samples: Sequence[ScheduledSample], rows: Sequence[tuple[int, int]]) -> None:
        """Give samples the experts of all of their tokens but the newest; `rows`: row and length of each.
        Tokens that have some keep them: they were sampled with these, and are computed again after
        preemption, maybe by newer weights."""
        parts = []
        ready = []
        for sample, (row, length) in zip(samples, rows, strict=True):
            # A decode prefill in progress has tokens that are not computed.
            if length > max(1, sample.decode_prefill_len):
                positions = torch.arange(_known(sample), length - 1)
                parts.append(torch.stack([torch.full_like(positions, row), positions]))
                ready.append((sample, len(positions)))
        if not parts:
            return
        index = torch.cat(parts, 1).to(cache.device)
        tensors = cache.tensors
        assert isinstance(tensors, RecordedTensors)
        found = tensors.read_experts(cache.slots(index[0], index[1]))
        start = 0
        for sample, count in ready:
            new = found[start : start + count].copy()
            start += count
            if sample.experts is not None:
                new = np.concatenate([sample.experts, new])
            sample.experts = new


def _known(sample: ScheduledSample) -> int:
    return 0 if sample.experts is None else len(sample.experts)
