"""An engine over many: requests go to the replica with the least to do, and to another life of it when it dies.

It is an `Engine` like any other: `agenerate` may be called by any number of coroutines and threads while `update_weights` runs
in another thread, `abort` ends what this rank has asked, and completions carry the version of the weights that sampled them. So
whatever runs sampling beside training needs to know nothing of processes or machines.

Ranks divide the replicas between them for asking. Weights come from rank 0, by the transport of the configuration
(transports.py); the other ranks take part in gathering them and wait until they are there.
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
from strop.rollout.outside import Answer, OutsideEngine
from strop.rollout.source import Source
from strop.runtime.transports import Transport

log = logging.getLogger(__name__)

MOST_DEATHS = 20
"""Deaths of replicas that one request survives: it may be the one that kills them."""
MOST_BARREN = 3
"""Lives of a replica in a row that may end without a single answer: what is wrong then is not chance."""


class Pool(Protocol):
    """The replicas, by number."""

    size: int

    def ask(self, number: int, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        """Fails with EngineDied when the replica is gone."""
        ...

    def life(self, number: int) -> int:
        """Which life of the replica is asked now."""
        ...

    def mend(self, number: int, life: int) -> None:
        """Return when a replica whose `life` has ended has a successor with the current weights; many may wait for it."""
        ...

    def stamp(self, version: int) -> None: ...

    def abort(self, number: int) -> None: ...

    def replaced(self) -> int:
        """How many replicas have died so far."""
        ...

    def close(self) -> None: ...


class Replicas(OutsideEngine):
    def __init__(self, source: Source, pool: Pool, transport: Transport, ranks: Ranks | None = None) -> None:
        """`transport`: brings weights to the replicas of `pool`; the first rank's is used."""
        super().__init__(source)
        self._pool, self._transport, self._ranks = pool, transport, ranks or Ranks()
        self.mine = mine(pool.size, self._ranks)
        self._work = dict.fromkeys(self.mine, 0)
        self._barren: dict[int, list[int]] = {number: [] for number in self.mine}
        """Lives of each replica that have ended since it last answered."""
        self._lock = threading.Lock()
        self._menders = ThreadPoolExecutor(max(4, len(self.mine)), thread_name_prefix="mender")
        self._sent, self._seconds, self._repeated = 0, 0.0, 0

    # --- asking ----------------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        answer: Answer = Future()
        self._send(replace(request, on_tokens=None), sampling, answer, 0)
        return answer

    def _send(self, request: Request, sampling: Sampling, answer: Answer, deaths: int) -> None:
        cost = request.n * (request.max_tokens or sampling.max_tokens)
        with self._lock:
            number = min(self.mine, key=lambda place: self._work[place])
            self._work[number] += cost
        life = self._pool.life(number)  # before it is asked: its successor must not be taken for the one that died
        asked = self._pool.ask(number, request, sampling)

        def settle(done: Answer) -> None:
            error = done.exception()
            with self._lock:
                self._work[number] -= cost
            if self._may_ask_again(number, life, error) and deaths < MOST_DEATHS:
                self._menders.submit(self._again, number, life, request, sampling, answer, deaths + 1)
                return
            with suppress(InvalidStateError):  # whoever asked may have gone
                answer.set_result(done.result()) if error is None else answer.set_exception(error)

        asked.add_done_callback(settle)

    def _may_ask_again(self, number: int, life: int, error: BaseException | None) -> bool:
        """Whether the replica has died, and a successor may do better."""
        with self._lock:
            barren = self._barren[number]
            if not isinstance(error, EngineDied):
                barren.clear()
                return False
            if life not in barren:
                log.warning("Replica %d is gone, its requests are asked again: %s", number, str(error)[-600:])
                barren.append(life)
            return len(barren) < MOST_BARREN

    def _again(self, number: int, life: int, request: Request, sampling: Sampling, answer: Answer, deaths: int) -> None:
        try:
            self._pool.mend(number, life)
            with self._lock:
                self._repeated += 1
            self._send(request, sampling, answer, deaths)
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the answer
            answer.set_exception(error)

    def abort(self) -> None:
        for number in self.mine:
            self._pool.abort(number)

    # --- weights ---------------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        start = time.perf_counter()
        if self._ranks.lead:
            sent = self._transport.send(weights, version)
            if not sent:
                self._pool.stamp(version)
            self._sent += sent
        else:
            for _ in weights:  # each of them is gathered from all ranks
                pass
        self._ranks.gather(version)  # nobody samples before the weights are there
        self._seconds += time.perf_counter() - start
        self.version = version

    # --- the rest --------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Replicas have devices of their own: there is nothing to give back."""

    def wake(self) -> None: ...

    def stats(self) -> Mapping[str, float]:
        numbers = {
            **super().stats(),
            "replicas": float(self._pool.size),
            "replicas_replaced": float(self._pool.replaced()),
            "repeated_requests": float(self._repeated),
            "weights_bytes": float(self._sent),
            "weights_seconds": self._seconds,
            **self._transport.stats(),
        }
        self._sent, self._seconds, self._repeated = 0, 0.0, 0
        return numbers

    def close(self) -> None:
        self._menders.shutdown(wait=False, cancel_futures=True)
        self._transport.close()
        self._pool.close()
        super().close()


def mine(size: int, ranks: Ranks) -> list[int]:
    """The replicas that a rank asks: a share of its own, or where there are fewer replicas than ranks one that it shares."""
    return list(range(ranks.rank, size, ranks.world)) or [ranks.rank % size]
