"""Runs what the service accepted: training requests through a fair queue in one thread, samples on the event
loop, where all of them share the batches of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from strop.rollout.cancellation import result_when_free
from strop.serve.messages import SampledSequence
from strop.serve.requests import SampleRequest
from strop.serve.store import ModelRecord, Stored
from strop.serve.trainer import ModelTrainer
from strop.serve.turns import FairQueue, ModelTurns

log = logging.getLogger(__name__)
Result = TypeVar("Result")
JOBS_PER_TURN = 16
"""Training requests that one turn carries out before samples may start again."""
DISK_PAUSE = 5.0
"""Seconds before a request whose answer could not be stored is carried out again."""


@dataclass(frozen=True)
class TrainingJob:
    """An accepted training request."""

    model: ModelRecord
    seq: int
    request: Stored


@dataclass(frozen=True)
class ScoreJob:
    """A prompt whose log-probs are asked for."""

    sampler: str | None
    prompt: list[int]
    done: asyncio.Future[list[float]]


class Dispatcher:
    """Gives the model to training and to sampling in turn."""

    def __init__(self, trainer: ModelTrainer, on_answer: Callable[[TrainingJob, Stored], None]) -> None:
        """`on_answer` is called on the event loop when a training request has its answer."""
        self._trainer = trainer
        self._on_answer = on_answer
        self._queue: FairQueue[TrainingJob] = FairQueue()
        self._scores: list[ScoreJob] = []
        self._work = asyncio.Event()
        self._turns = ModelTurns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strop-train")

    @property
    def waiting(self) -> int:
        """Training requests that wait."""
        return len(self._queue)

    # --- what others ask for --------------------------------------------------------------------------------

    def enqueue(self, job: TrainingJob) -> None:
        self._queue.put(job.model.session_id, job)
        self._work.set()

    async def score(self, sampler: str | None, prompt: list[int]) -> list[float]:
        """The log-probs of a prompt's tokens after the first; prompts that wait at once share passes."""
        done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._scores.append(ScoreJob(sampler, prompt, done))
        self._work.set()
        return await done

    async def sample(self, sampler: str | None, request: SampleRequest, seed: int) -> list[SampledSequence]:
        if not self._trainer.is_published(sampler):
            async with self._turns.training():
                await self._publish(sampler)
        async with self._turns.sampling():
            if self._trainer.is_published(sampler):
                return await self._trainer.host.sample(sampler, request, seed)
        # It had to make room for others while this sample waited. A second time it may not: with fewer places
        # than samplers, all of them would publish and withdraw each other forever.
        async with self._turns.sampling_after(lambda: self._publish(sampler)):
            return await self._trainer.host.sample(sampler, request, seed)

    async def alone(self, call: Callable[[], Result]) -> Result:
        """Call a function in the thread of training, while nothing is sampled."""
        async with self._turns.training():
            return await self._in_thread(call)

    async def _publish(self, sampler: str | None) -> None:
        if sampler is not None:
            path = sampler
            await self._in_thread(lambda: self._trainer.publish(path))

    # --- turns of training ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._work.wait()
            async with self._turns.training():
                await self._score_all()
                for _ in range(JOBS_PER_TURN):
                    job = self._queue.take()
                    if job is None:
                        break
                    await self._answer(job)
                    await self._score_all()
            if not len(self._queue) and not self._scores:
                self._work.clear()

    async def _answer(self, job: TrainingJob) -> None:
        """Carry out a request. It is stored, so where the disk fails it is carried out again."""
        while True:
            try:
                answer = await self._in_thread(lambda: self._trainer.answer(job.model, job.seq, job.request))
                self._on_answer(job, answer)
                return
            except OSError as error:
                log.error("Request %d of %s waits for the disk: %s", job.seq, job.model.model_id, error)
                await self._in_thread(lambda: self._trainer.release(job.model.model_id))
                await asyncio.sleep(DISK_PAUSE)

    async def _score_all(self) -> None:
        """Score the prompts that wait, all prompts of one sampler together."""
        jobs = self._scores
        self._scores = []
        for sampler in dict.fromkeys(job.sampler for job in jobs):
            own = [job for job in jobs if job.sampler == sampler and not job.done.done()]
            await self._score_together(sampler, own)

    async def _score_together(self, sampler: str | None, jobs: list[ScoreJob]) -> None:
        prompts = [job.prompt for job in jobs]

        def score() -> list[list[float]]:
            if sampler is not None:
                self._trainer.publish(sampler)
            return [row.tolist() for row in self._trainer.host.score(sampler, prompts)]

        try:
            rows = await self._in_thread(score)
        except Exception as error:  # noqa: BLE001 - raised where the results are awaited
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)
            return
        for job, row in zip(jobs, rows, strict=True):
            if not job.done.done():
                job.done.set_result(row)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        """A caller that is cancelled keeps its turn until the call has ended."""
        return await result_when_free(asyncio.get_running_loop().run_in_executor(self._thread, call))

    async def close(self) -> None:
        await self._in_thread(self._trainer.close)
        self._thread.shutdown()
