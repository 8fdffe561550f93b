"""A rollout engine with its own copy of the weights, in its own process: it serves a share of the requests.

Methods are coroutines, so that thousands of requests run at once and share the engine's batches. This file
knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import queue
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.config.schema.model import ModelConfig
from strop.models.build import allocate, build_reference, compute_dtype
from strop.rollout.base import Completion, Engine, Request, Sampling, build_engine
from strop.rollout.buckets import read_bucket
from strop.rollout.external import ExternalEngine, engine_folder
from strop.runtime.launch import enter_folder
from strop.runtime.weight_broadcast import BroadcastGroup, Rendezvous, join_group

NamedWeights = list[tuple[str, Tensor]]
PUT_TIMEOUT = 0.05
"""Seconds between two checks whether the engine still takes weights."""


@dataclass(frozen=True)
class ReplicaSpec:
    """How a replica is built. Its weights come later, from the trainer."""

    engine: str
    model: ModelConfig
    settings: Mapping[str, Any]
    """Keyword arguments of `build_engine`."""
    dtype: str
    device: str
    """As in trainer.device."""
    holds_weights: bool
    """Whether the engine itself builds a model from the folder."""
    folder: str = "."
    """Where relative paths begin."""

    def make(self) -> Engine:
        """Build the engine."""
        enter_folder(self.folder)
        if self.holds_weights:
            return build_engine(self.engine, engine_folder(self.model), **self.settings)
        device = self.place()
        module = build_reference(self.model, dtype=compute_dtype(self.dtype, device), weights=False)
        allocate(module, device)
        return build_engine(self.engine, module, **self.settings)

    def place(self) -> torch.device:
        """Return the device that receives new weights: the CPU for an engine with its own model."""
        wants_gpu = self.device != "cpu" and not self.holds_weights
        if wants_gpu and torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("cpu")


class RolloutReplica:
    """Serves requests and takes new weights, bucket by bucket."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.engine = spec.make()
        self._update_thread = ThreadPoolExecutor(1)
        self._feed = WeightFeed()
        self._update: Future[None] | None = None
        self._group: BroadcastGroup | None = None
        self._device = spec.place()

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Return the completions of one request."""
        return await self.engine.agenerate(request, sampling)

    async def load(self, memory: np.ndarray | str, contents: str, version: int) -> None:
        """Take one bucket of new weights, or the path of its file.

        The engine loads weights as they come. It has all of them when the call with the last bucket returns.
        """
        array = map_file(memory) if isinstance(memory, str) else memory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is read-only; nothing writes to it
            tensor = torch.from_numpy(array)
        await self._take(contents, tensor, version)

    async def join(self, rendezvous: Rendezvous, rank: int) -> None:
        """Join the group that broadcasts weights, and leave the one before."""
        if self._group is not None:
            await asyncio.to_thread(self._group.leave)
        self._group = await asyncio.to_thread(join_group, rendezvous, rank, self._device)

    async def receive(self, version: int) -> None:
        """Take all buckets of new weights from the group."""
        group = self._group
        assert group is not None, "a member of a group"
        last = False
        try:
            while not last:
                contents, memory = await asyncio.to_thread(group.receive)
                last = await self._take(contents, memory, version)
            group.release_memory()
        except BaseException:
            group.leave()
            raise

    async def _take(self, contents: str, memory: Tensor, version: int) -> bool:
        """Feed a bucket to the engine; whether it was the last.

        When the group breaks in an update, the same update goes on with the buckets that come by another
        way: the engine must not sample in between.
        """
        weights, first, last = read_bucket(contents, memory)
        if isinstance(self.engine, ExternalEngine):  # it collects all weights, but this memory is reused
            weights = [(name, weight.to("cpu", copy=True)) for name, weight in weights]
        if first and (self._update is None or self._update.done()):
            self._feed = WeightFeed()
            self._update = self._update_thread.submit(self.engine.update_weights, self._feed, version)
        assert self._update is not None, "weights begin with a first bucket"
        await asyncio.to_thread(self._feed.give, weights, last, self._update)
        return last

    async def set_version(self, version: int) -> None:
        """Set the version of the weights without new weights."""
        await asyncio.to_thread(self.engine.update_weights, (), version)

    async def abort(self) -> None:
        """End all running requests."""
        await asyncio.to_thread(self.engine.abort)

    async def ready(self) -> int:
        """Return the version of the weights; the engine has been built."""
        return self.engine.version


class WeightFeed:
    """A queue of one bucket between the transport and the engine, which takes weights one by one."""

    def __init__(self) -> None:
        self._buckets: queue.Queue[NamedWeights | None] = queue.Queue(1)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._buckets.get()) is not None:
            yield from bucket

    def give(self, weights: NamedWeights, last: bool, consumer: Future[None]) -> None:
        """Add a bucket. Returns when there is room for the next one; after the last one, when the consumer
        has ended. Raises what the consumer raised."""
        self._put(weights, consumer)
        if last:
            self._put(None, consumer)
        if last or consumer.done():
            consumer.result()

    def _put(self, bucket: NamedWeights | None, consumer: Future[None]) -> None:
        while not consumer.done():
            try:
                self._buckets.put(bucket, timeout=PUT_TIMEOUT)
                return
            except queue.Full:
                continue


def map_file(path: str) -> np.ndarray:
    """Map the file of a bucket into memory."""
    try:
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise ValueError(
            f"A replica cannot read new weights from {path} ({error.strerror}). All machines must see the "
            "folder actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.folder; set another, or "
            "checkpoint_engine.backend=naive."
        ) from error
