"""Asynchronous sampling (trainer.async_training): prompts are sampled before the step that trains on them.

Batches wait in a queue in the order in which they were drawn, and a step takes the oldest one. Short
responses never overtake long ones, so the staleness of a sample depends only on its place in the queue. The
number of prompts that may be started is counted from the latest weight sync of the engine.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.data.loader import Loader
from strop.ppo.collect import Draw, draw_prompts
from strop.ppo.rank_sharing import all_gather_trajectories, shard_prompts
from strop.ppo.sampler import NumberedPrompt, Samples, StepRollout
from strop.ranks import Ranks
from strop.rollout.interruptible import Interruptible
from strop.types import Prompt, Trajectory

JOIN_SECONDS = 20.0
"""How long `close` waits for the threads. They are daemons, so the process can end without them."""


@dataclass(eq=False)
class QueuedBatch:
    """Prompts that were drawn together, and the futures of their samples."""

    step: int
    """The step whose random streams they use."""
    first: int
    """Group number of the first prompt."""
    prompts: list[Prompt]
    draws: int
    """Calls of the loader that gave the prompts."""
    local: list[NumberedPrompt]
    """The prompts that this rank samples."""
    started: int = 0
    """How many of the prompts are being sampled, or are done."""
    futures: list[Future[Samples]] = field(default_factory=list)

    @property
    def not_started(self) -> int:
        return len(self.prompts) - self.started

    def start_next(self, count: int) -> list[NumberedPrompt]:
        """Mark the next `count` prompts as started; returns those of this rank."""
        start = self.first + self.started
        self.started = min(len(self.prompts), self.started + count)
        end = self.first + self.started
        return [numbered for numbered in self.local if start <= numbered[0] < end]


@dataclass(eq=False)
class AsyncRollout:
    """Samples in background threads, ahead of training."""

    engine: Interruptible
    rollout: StepRollout
    """Samples with `engine`, on this rank alone."""
    between_syncs: int
    """Prompts that may be started from one weight sync to the next. 0: each starts with its step."""
    last_step: int
    """Nothing is started for later steps."""
    overlaps_training: bool
    """Sampling continues while the models train. Else it is stopped between two steps."""
    ranks: Ranks = field(default_factory=Ranks)
    tensor_parallel: int = 1
    """Neighbouring ranks that sample the same prompts together."""
    on_use: Callable[[int], None] | None = None
    """Called with the number of draws that a step has taken."""

    _queue: deque[QueuedBatch] = field(default_factory=deque)
    _numbered: Counter[int] = field(default_factory=Counter)
    """Prompts drawn so far, by the step whose random streams they use."""
    _taken: int = 0
    """Prompts that were handed to steps."""
    _started: int = 0
    """Prompts whose sampling was started."""
    _allowed: int = 0
    """Limit of `_started` under the current weights."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_weight_sync()
        if not self.overlaps_training:
            self.engine.stop()

    def on_weight_sync(self) -> None:
        """The engine has new weights: further prompts may be started."""
        self._allowed = self._taken + self.between_syncs

    def metrics(self) -> dict[str, float]:
        """How many prompts are being sampled or wait to be trained on."""
        return {"staleness/prompts_ahead": self._started - self._taken}

    @contextmanager
    def sampling_allowed(self) -> Iterator[None]:
        """Around the sampling of a step. Where models and engine share weights or memory, nothing is sampled
        outside of it."""
        if self.overlaps_training:
            yield
            return
        self.engine.go()
        yield
        self.engine.stop()  # not after a failure: close() then aborts what is running and does not wait long

    def take(self, draw: Draw, prompts: int, step: int, first: int) -> tuple[int, Samples]:
        """The oldest batch, of at least `prompts` prompts: their count, and the samples of all ranks with
        groups numbered from `first`."""
        if not self._queue:
            self._queue.append(self._draw_batch(draw, prompts, step))
        batch = self._queue[0]
        self._start(batch, batch.not_started)
        self._start_ahead(draw, prompts, step)
        local = self.ranks.run_or_raise_on_all(lambda: self._wait_for(batch), "sampling", can_drop=True)
        self._queue.popleft()
        for earlier in [other for other in self._numbered if other < step]:
            del self._numbered[earlier]
        self._taken += len(batch.prompts)
        if self.on_use is not None:
            self.on_use(batch.draws)
        samples = Samples(
            self._gather(batch, local.trajectories, first),
            self._gather(batch, local.greedy, first) if self.rollout.greedy_baseline else [],
            local.episodes,
        )
        return len(batch.prompts), samples

    def close(self) -> bool:
        """Stop all threads, and return even if the engine hangs; whether all threads ended."""
        self.engine.end()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._queue.clear()
        self.rollout.sampler.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _gather(self, batch: QueuedBatch, local: list[Trajectory], first: int) -> list[Trajectory]:
        prompts = dict(enumerate(batch.prompts, batch.first))
        gathered = all_gather_trajectories(local, prompts, self.ranks, self.tensor_parallel)
        for trajectory in gathered:
            trajectory.group += first - batch.first
        return gathered

    def _start_ahead(self, draw: Draw, prompts: int, step: int) -> None:
        """Start what may be started under the current weights."""
        while (room := self._allowed - self._started) > 0:
            batch = next((batch for batch in self._queue if batch.not_started), None)
            if batch is None:
                of_step = step + len(self._queue)
                if of_step > self.last_step:
                    return
                batch = self._draw_batch(draw, prompts, of_step)
                self._queue.append(batch)
            self._start(batch, min(room, batch.not_started))

    def _draw_batch(self, draw: Draw, prompts: int, step: int) -> QueuedBatch:
        drawn, draws = draw_prompts(draw, prompts)
        first = self._numbered[step]
        self._numbered[step] += len(drawn)
        shards = shard_prompts(list(enumerate(drawn, first)), self.ranks, self.tensor_parallel)
        return QueuedBatch(step, first, drawn, draws, shards[self.ranks.rank // self.tensor_parallel])

    def _start(self, batch: QueuedBatch, count: int) -> None:
        if count == 0:
            return
        self._started += count
        prompts = batch.start_next(count)
        if prompts:
            batch.futures.append(self._sample_in_thread(prompts, batch.step))

    def _sample_in_thread(self, prompts: list[NumberedPrompt], step: int) -> Future[Samples]:
        future: Future[Samples] = Future()
        cores = torch.get_num_threads()

        def run() -> None:
            # A new thread begins with the default of the machine. Other numbers of threads split sums
            # differently, which changes their last bits.
            torch.set_num_threads(cores)
            try:
                future.set_result(self.rollout.generate(prompts, step))
            except BaseException as error:  # noqa: BLE001 - raised again where the samples are waited for
                future.set_exception(error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name=f"strop-rollout-{step}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def _wait_for(self, batch: QueuedBatch) -> Samples:
        """The samples of a batch. An error in any batch of the queue is raised at once."""
        futures: list[Future[Samples]] = []
        for other in self._queue:
            futures += other.futures
        while True:
            for future in futures:
                if future.done():
                    future.result()
            if all(future.done() for future in batch.futures):
                return sum((future.result() for future in batch.futures), Samples())
            wait([future for future in futures if not future.done()], return_when=FIRST_COMPLETED)


@dataclass
class DrawnAhead:
    """A loader whose state is that before its oldest draw that was not trained on yet.

    The queue of `AsyncRollout` is not part of a checkpoint. A resumed run draws its prompts again, so no row
    is lost and none is trained twice.
    """

    loader: Loader
    _states: deque[dict[str, Any]] = field(default_factory=deque)
    """The state before each draw that is not used yet, oldest first."""

    def draw(self) -> list[Prompt]:
        self._states.append(copy.deepcopy(self.loader.state_dict()))
        return self.loader.draw()

    def used(self, draws: int) -> None:
        """A step trains on the oldest `draws` draws."""
        for _ in range(draws):
            self._states.popleft()

    @property
    def epoch(self) -> int:
        return int(self._states[0]["epoch"]) if self._states else self.loader.epoch

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._states[0]) if self._states else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states.clear()
        self.loader.load_state_dict(state)

    def update(self, trajectories: list[Trajectory]) -> None:
        self.loader.update(trajectories)

    def close(self) -> None:
        self.loader.close()
