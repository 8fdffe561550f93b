"""Fairness: sessions take turns, and neither training nor sampling keeps the other away."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from strop.serve.dispatch import Dispatcher
from strop.serve.turns import FairQueue, ModelTurns


def test_sessions_take_turns_and_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for session, job in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        queue.put(session, job)
    taken = []
    while (job := queue.take()) is not None:
        taken.append(job)
    assert taken == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(queue) == 0


def test_training_is_alone_and_alternates_with_sampling() -> None:
    async def scene() -> list[str]:
        turns = ModelTurns()
        happened: list[str] = []
        release = asyncio.Event()
        started = asyncio.Event()

        async def sample(name: str, wait: asyncio.Event | None = None) -> None:
            async with turns.sampling():
                happened.append(f"{name} in")
                started.set()
                if wait is not None:
                    await wait.wait()
                happened.append(f"{name} out")

        async def train(name: str) -> None:
            async with turns.training():
                happened.append(name)
                await asyncio.sleep(0)

        first = asyncio.create_task(sample("s1", release))
        await started.wait()
        tasks = [asyncio.create_task(one) for one in (train("t1"), train("t2"), sample("s2"), sample("s3"))]
        gone = asyncio.create_task(sample("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        release.set()
        await asyncio.gather(first, *tasks)
        async with turns.training():  # nothing is held
            pass
        return happened

    happened = asyncio.run(asyncio.wait_for(scene(), 10))
    # s2 and s3 came while training waited, so they come after its first turn and before the second.
    assert happened[:3] == ["s1 in", "s1 out", "t1"]
    assert set(happened[3:7]) == {"s2 in", "s2 out", "s3 in", "s3 out"} and happened[7:] == ["t2"]


class OnePlace:
    """A trainer with room for the weights of one sampler."""

    def __init__(self) -> None:
        self.host = self
        self.published: str | None = None

    def is_published(self, path: str | None) -> bool:
        return path == self.published

    def publish(self, path: str) -> None:
        self.published = path

    async def sample(self, path: str, request: object, seed: int) -> str:
        await asyncio.sleep(0.001)
        assert self.published == path
        return path


def test_more_samplers_than_places_do_not_withdraw_each_other_forever() -> None:
    async def scene() -> list[Any]:
        trainer: Any = OnePlace()
        dispatcher = Dispatcher(trainer, lambda *_: None)
        request: Any = None
        paths = [f"p{number % 4}" for number in range(12)]
        return await asyncio.gather(*(dispatcher.sample(path, request, 0) for path in paths))

    assert asyncio.run(asyncio.wait_for(scene(), 10)) == [f"p{number % 4}" for number in range(12)]


def test_a_cancelled_sample_keeps_its_turn_until_its_weights_are_published() -> None:
    """Another sample would begin in between, and may lose its own weights to those that are published."""
    publishing = threading.Event()
    happened: list[str] = []

    class Trainer:
        host: Any

        def __init__(self) -> None:
            self.host = self

        def is_published(self, sampler: str | None) -> bool:
            return sampler is None

        def publish(self, sampler: str) -> None:
            happened.append("publishes")
            assert publishing.wait(10)
            happened.append("published")

        async def sample(self, sampler: str | None, request: object, seed: int) -> list[object]:
            happened.append("samples")
            return []

    async def scene() -> None:
        trainer: Any = Trainer()
        request: Any = None
        dispatcher = Dispatcher(trainer, lambda *_: None)
        gone = asyncio.create_task(dispatcher.sample("weights", request, 0))
        while not happened:
            await asyncio.sleep(0.001)
        gone.cancel()
        other = asyncio.create_task(dispatcher.sample(None, request, 0))
        await asyncio.sleep(0.02)
        publishing.set()
        await asyncio.gather(gone, other, return_exceptions=True)
        assert gone.cancelled()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert happened == ["publishes", "published", "samples"]
