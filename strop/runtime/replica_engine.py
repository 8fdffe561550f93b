"""An engine over many rollout replicas: each request goes to the replica with the least work.

It is an `Engine` like any other: `agenerate` may be called by any number of coroutines and threads while
`update_weights` runs in another thread, `abort` ends the requests of this rank, and completions carry the
version of the weights that sampled them. The trainer needs to know nothing of processes or machines.

Ranks divide the replicas between them. Weights come from rank 0, by the configured transport
(weight_transports.py); the other ranks take part in gathering them and wait until they have arrived. A
request whose replica dies is sent again after the replica was restarted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from strop.ranks import Ranks
from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.rollout.external import CompletionsFuture, ExternalEngine, ModelSource
from strop.runtime.weight_transports import Transport

log = logging.getLogger(__name__)

MAX_DEATHS_PER_REQUEST = 20
"""Deaths of replicas that one request survives: the request itself may be what kills them."""
MAX_DEATHS_WITHOUT_ANSWER = 3
"""Deaths of one replica in a row without a single answer: more than that is no accident."""


class ReplicaPool(Protocol):
    """The replicas, by number. A replica that was restarted has the same number and a new incarnation."""

    size: int

    def generate(self, number: int, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        """Send a request to a replica. The future fails with EngineDied when the replica is gone."""
        ...

    def incarnation(self, number: int) -> int:
        """Return how often the replica was restarted."""
        ...

    def wait_for_restart(self, number: int, incarnation: int) -> None:
        """Return when the replica was restarted after this incarnation and has the current weights. Many
        threads may wait for it."""
        ...

    def set_version(self, version: int) -> None:
        """Set the version of the weights of all replicas."""
        ...

    def abort(self, number: int) -> None:
        """End the running requests of a replica."""
        ...

    def replaced(self) -> int:
        """Return how many replicas have died so far."""
        ...

    def close(self) -> None: ...


class ReplicaEngine(ExternalEngine):
    """The replicas of a run as one engine, in one rank."""

    def __init__(
        self, source: ModelSource, pool: ReplicaPool, transport: Transport, ranks: Ranks | None = None
    ) -> None:
        """`transport` brings weights to the replicas of `pool`; only that of rank 0 is used."""
        super().__init__(source)
        self._pool = pool
        self._transport = transport
        self._ranks = ranks or Ranks()
        self.replicas = replicas_of_rank(pool.size, self._ranks)
        self._pending_tokens = dict.fromkeys(self.replicas, 0)
        self._deaths_since_answer: dict[int, list[int]] = {number: [] for number in self.replicas}
        """Incarnations of each replica that died since it last answered."""
        self._lock = threading.Lock()
        self._retry_threads = ThreadPoolExecutor(max(4, len(self.replicas)), thread_name_prefix="retry")
        self._weight_bytes = 0
        self._weight_seconds = 0.0
        self._repeated_requests = 0

    # --- requests -------------------------------------------------------------------------------------------

    def _send_request(self, request: Request, sampling: Sampling) -> CompletionsFuture:
        answer: CompletionsFuture = Future()
        self._send(replace(request, on_tokens=None), sampling, answer, 0)
        return answer

    def _send(self, request: Request, sampling: Sampling, answer: CompletionsFuture, deaths: int) -> None:
        """Send a request to the replica with the least work. `deaths`: how many it survived so far."""
        tokens = request.n * (request.max_tokens or sampling.max_tokens)
        with self._lock:
            number = min(self.replicas, key=lambda replica: self._pending_tokens[replica])
            self._pending_tokens[number] += tokens
        # Read before the request is sent: a restarted replica must not be taken for the one that died.
        incarnation = self._pool.incarnation(number)
        sent = self._pool.generate(number, request, sampling)

        def settle(done: CompletionsFuture) -> None:
            error = done.exception()
            with self._lock:
                self._pending_tokens[number] -= tokens
            if self._may_retry(number, incarnation, error) and deaths < MAX_DEATHS_PER_REQUEST:
                self._retry_threads.submit(
                    self._retry, number, incarnation, request, sampling, answer, deaths + 1
                )
                return
            with suppress(InvalidStateError):  # the caller may have cancelled it
                if error is None:
                    answer.set_result(done.result())
                else:
                    answer.set_exception(error)

        sent.add_done_callback(settle)

    def _may_retry(self, number: int, incarnation: int, error: BaseException | None) -> bool:
        """Whether the replica has died, and a restarted one may succeed."""
        with self._lock:
            deaths = self._deaths_since_answer[number]
            if not isinstance(error, EngineDied):
                deaths.clear()
                return False
            if incarnation not in deaths:
                log.warning("Replica %d is gone, its requests are sent again: %s", number, str(error)[-600:])
                deaths.append(incarnation)
            return len(deaths) < MAX_DEATHS_WITHOUT_ANSWER

    def _retry(
        self,
        number: int,
        incarnation: int,
        request: Request,
        sampling: Sampling,
        answer: CompletionsFuture,
        deaths: int,
    ) -> None:
        try:
            self._pool.wait_for_restart(number, incarnation)
            with self._lock:
                self._repeated_requests += 1
            self._send(request, sampling, answer, deaths)
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)

    def abort(self) -> None:
        for number in self.replicas:
            self._pool.abort(number)

    # --- weights --------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        start = time.perf_counter()
        if self._ranks.is_rank0:
            sent = self._transport.send(weights, version)
            if not sent:
                self._pool.set_version(version)
            self._weight_bytes += sent
        else:
            for _ in weights:  # each weight is gathered from all ranks
                pass
        self._ranks.all_gather_object(version)  # no rank samples before the weights have arrived
        self._weight_seconds += time.perf_counter() - start
        self.version = version

    # --- the rest of an engine ------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Do nothing: replicas have their own devices."""

    def wake(self) -> None: ...

    def stats(self) -> Mapping[str, float]:
        numbers = {
            **super().stats(),
            "replicas": float(self._pool.size),
            "replicas_replaced": float(self._pool.replaced()),
            "repeated_requests": float(self._repeated_requests),
            "weights_bytes": float(self._weight_bytes),
            "weights_seconds": self._weight_seconds,
            **self._transport.stats(),
        }
        self._weight_bytes = 0
        self._weight_seconds = 0.0
        self._repeated_requests = 0
        return numbers

    def close(self) -> None:
        self._retry_threads.shutdown(wait=False, cancel_futures=True)
        self._transport.close()
        self._pool.close()
        super().close()


def replicas_of_rank(size: int, ranks: Ranks) -> list[int]:
    """Return the replicas that a rank uses: its share, or one shared replica when there are fewer than
    ranks."""
    return list(range(ranks.rank, size, ranks.world)) or [ranks.rank % size]
