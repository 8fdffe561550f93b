"""A rollout engine with weights of its own, in a process of its own: what answers one part of the requests of a run.

Methods are coroutines, so that thousands of requests are under way at once and share the engine's batches. This file knows
nothing of Ray.
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

from strop.models.build import build_reference, compute_dtype
from strop.models.hollow import give_memory
from strop.rollout.base import Completion, Engine, Request, Sampling
from strop.rollout.buckets import read_bucket
from strop.rollout.build import build_engine
from strop.rollout.outside import OutsideEngine
from strop.runtime.broadcast import Group, Meeting, join


@dataclass(frozen=True)
class Recipe:
    """How a replica is made; its weights come later."""

    engine: str
    model: Any
    """The `model` section of the configuration."""
    settings: Mapping[str, Any]
    """Of `build_engine`."""
    dtype: str
    device: str
    """As in trainer.device."""
    holds_weights: bool
    """Whether the engine makes a model by itself from the folder."""

    def make(self) -> Engine:
        if self.holds_weights:
            return build_engine(self.engine, self.model.path, **self.settings)
        device = self.place()
        module = build_reference(self.model, dtype=compute_dtype(self.dtype, device), weights=False)
        give_memory(module, device)
        return build_engine(self.engine, module, **self.settings)

    def place(self) -> torch.device:
        """Where it wants its weights; an engine that holds a model of its own is given them in host memory."""
        wanted = self.device != "cpu" and not self.holds_weights
        return torch.device("cuda" if wanted and torch.cuda.is_available() else "cpu")


class Replica:
    def __init__(self, recipe: Recipe) -> None:
        self.engine = recipe.make()
        self._one = ThreadPoolExecutor(1)
        self._feed = Feed()
        self._update: Future[None] | None = None
        self._group: Group | None = None
        self._device = recipe.place()

    async def ask(self, request: Request, sampling: Sampling) -> list[Completion]:
        return await self.engine.agenerate(request, sampling)

    async def load(self, memory: np.ndarray | str, contents: str, version: int) -> None:
        """One bucket of new weights, or the file it lies in. The engine takes them as they come, and has them all when the last
        bucket returns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch minds that the memory cannot be written; nobody will
            found = torch.from_numpy(_mapped(memory) if isinstance(memory, str) else memory)
        await self._take(contents, found, version)

    async def join(self, meeting: Meeting, rank: int) -> None:
        """Become a member of the group by which weights will come; of no other any longer."""
        if self._group is not None:
            await asyncio.to_thread(self._group.leave)
        self._group = await asyncio.to_thread(join, meeting, rank, self._device)

    async def receive(self, version: int) -> None:
        """All buckets of new weights, from the group."""
        group, last = self._group, False
        assert group is not None, "a member of a group"
        try:
            while not last:
                contents, memory = await asyncio.to_thread(group.receive)
                last = await self._take(contents, memory, version)
            group.rest()
        except BaseException:
            group.leave()
            raise

    async def _take(self, contents: str, memory: Tensor, version: int) -> bool:
        """Feed a bucket to the engine; whether it was the last. An update whose group broke goes on with what comes instead:
        the engine must not sample in between."""
        weights, first, last = read_bucket(contents, memory)
        if isinstance(self.engine, OutsideEngine):  # it collects them first, and this memory is given back
            weights = [(name, weight.to("cpu", copy=True)) for name, weight in weights]
        if first and (self._update is None or self._update.done()):
            self._feed = Feed()
            self._update = self._one.submit(self.engine.update_weights, self._feed, version)
        assert self._update is not None, "weights begin with a first bucket"
        await asyncio.to_thread(self._feed.give, weights, last, self._update)
        return last

    async def stamp(self, version: int) -> None:
        await asyncio.to_thread(self.engine.update_weights, (), version)

    async def abort(self) -> None:
        await asyncio.to_thread(self.engine.abort)

    async def ready(self) -> int:
        return self.engine.version


class Feed:
    """Weights on their way from whoever brings them, a bucket at a time, to an engine that wants them one by one."""

    def __init__(self) -> None:
        self._buckets: queue.Queue[list[tuple[str, Tensor]] | None] = queue.Queue(1)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._buckets.get()) is not None:
            yield from bucket

    def give(self, weights: list[tuple[str, Tensor]], last: bool, taker: Future[None]) -> None:
        """Returns when there is room for the next; after the last, when the taker has taken all. Raises what it raised."""
        for bucket in (weights, None) if last else (weights,):
            while not taker.done():
                try:
                    self._buckets.put(bucket, timeout=0.05)
                    break
                except queue.Full:
                    continue
        if last or taker.done():
            taker.result()


def _mapped(path: str) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise ValueError(
            f"A replica cannot read new weights from {path} ({error.strerror}). All machines must see the folder "
            "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.folder; set another, or checkpoint_engine.backend=naive."
        ) from error
