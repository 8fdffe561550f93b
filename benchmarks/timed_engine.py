"""A stand-in for an engine on machines of its own: real tokens, and a clock that makes them as slow as
wanted.

Name it by `plugins=[benchmarks/timed_engine.py] actor_rollout_ref.rollout.name=timed`. The tokens are the
native engine's. A sample holds one of `rows` rows for as long as its tokens take, whoever else runs, as in a
decoder that is bound by memory. Some samples take much longer than most; which, and how much, is a function
of the seed, so that every way of training meets the same tail. The processor is free meanwhile.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from strop.catalog import ENGINES
from strop.rollout.base import Completion, MoreRequests, Request, Sampling, refuse_more
from strop.rollout.native.engine import NativeEngine


@dataclass(eq=False)
class Row:
    completion: Completion
    seconds_per_token: float
    start: float | None = None
    """None: it waits for a row."""
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def end(self) -> float:
        assert self.start is not None
        return self.start + self.seconds_per_token * len(self.completion.ids)

    def cut(self, now: float) -> None:
        """Only what was said until now."""
        tokens = 0 if self.start is None else int((now - self.start) / self.seconds_per_token)
        if tokens < len(self.completion.ids):
            c = self.completion
            self.completion = Completion(c.ids[:tokens], c.log_probs[:tokens], "abort", c.version)
        self.done.set()


@ENGINES.register("timed", settings=("max_model_len", "max_num_seqs", "seed", "engine_kwargs"))
class TimedEngine:
    same_stream = True

    def __init__(
        self,
        model: Any,
        *,
        max_num_seqs: int = 256,
        engine_kwargs: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        """`engine_kwargs`: `seconds`, of the median token, and `spread`, sigma of the logarithm of a sample's
        slowness."""
        own = engine_kwargs or {}
        self.native = NativeEngine(model, **settings)
        self.rows, self.seconds, self.spread = max_num_seqs, own.get("seconds", 0.01), own.get("spread", 1.0)
        self._changed = threading.Condition()
        self._native = threading.Lock()
        self._waiting: deque[Row] = deque()
        self._running: list[tuple[float, int, Row]] = []
        self._tokens, self._since = 0, time.perf_counter()
        self._open = True
        threading.Thread(target=self._keep_time, name="timed-engine", daemon=True).start()

    @property
    def version(self) -> int:
        return self.native.version

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: MoreRequests | None = None
    ) -> list[list[Completion]]:
        refuse_more(self, more)
        with self._native:
            answers = self.native.generate(requests, sampling)
        rows = [
            [Row(completion, self._slowness(request, j)) for j, completion in enumerate(found)]
            for request, found in zip(requests, answers)
        ]
        with self._changed:
            self._waiting.extend(row for found in rows for row in found)
            self._changed.notify_all()
        for found in rows:
            for row in found:
                row.done.wait()
        return [[row.completion for row in found] for found in rows]

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        import asyncio

        return (await asyncio.to_thread(self.generate, [request], sampling))[0]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.native.update_weights(weights, version)

    def use_stream(self, stream: Any) -> None:
        self.native.use_stream(stream)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def release_memory(self) -> bool:
        return False

    def abort(self) -> None:
        with self._changed:
            now = time.perf_counter()
            for row in [*self._waiting, *(row for _, _, row in self._running)]:
                row.cut(now)
                self._tokens += len(row.completion.ids)
            self._waiting.clear()
            self._running.clear()
            self._changed.notify_all()

    def stats(self) -> Mapping[str, float]:
        with self._changed:
            now, tokens = time.perf_counter(), self._tokens
            seconds, self._since, self._tokens = now - self._since, now, 0
        return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}

    def close(self) -> None:
        self._open = False
        self.abort()

    def _slowness(self, request: Request, sample: int) -> float:
        if request.seed is None:
            return self.seconds
        return self.seconds * math.exp(
            self.spread * random.Random(f"{request.seed}/{request.first + sample}").gauss(0.0, 1.0)
        )

    def _keep_time(self) -> None:
        with self._changed:
            while self._open:
                now = time.perf_counter()
                while self._running and self._running[0][0] <= now:
                    row = heapq.heappop(self._running)[2]
                    self._tokens += len(row.completion.ids)
                    row.done.set()
                while self._waiting and len(self._running) < self.rows:
                    row = self._waiting.popleft()
                    row.start = now
                    heapq.heappush(self._running, (row.end, id(row), row))
                self._changed.wait(
                    max(0.0, self._running[0][0] - time.perf_counter()) if self._running else None
                )
