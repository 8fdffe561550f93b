"""Watches the ranks on a cluster until all have ended, and finds the rank that failed first."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from strop.runtime.failure import MACHINE_LOST, RankFailure, first_cause
from strop.runtime.ray.connection import (
    HEAD_TIMEOUT,
    ActorHandle,
    ClusterHead,
    ClusterLost,
    ObjectRef,
    short_error,
)
from strop.runtime.ray.rank_launcher import STDOUT, EndedProcess, Machine

POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
OUTPUT_TIMEOUT = 60.0
"""Seconds in which a launcher must return the output of its rank."""


class RankWatcher:
    """The ranks of one attempt, in the order of their numbers."""

    def __init__(
        self,
        ray: ModuleType,
        launchers: Sequence[ActorHandle],
        machines: Sequence[Machine],
        runs: Sequence[ObjectRef],
    ) -> None:
        """`runs`: the running calls of `RankLauncher.run`."""
        self._ray = ray
        self._launchers = launchers
        self._machines = machines
        self._runs = runs
        self._world_size = len(runs)
        self._ended: dict[int, EndedProcess] = {}
        self._details: dict[int, str] = {}
        """What Ray says about ranks that were lost with their machine."""

    def watch(self) -> RankFailure | None:
        """Wait for all ranks; the failure that came first, or None.

        After a failure, the other ranks have GRACE_SECONDS to end; then they are stopped.
        """
        head = ClusterHead(self._ray.get_runtime_context().gcs_address)
        deadline = math.inf
        with collect_signals() as signals:
            while len(self._ended) < self._world_size and time.monotonic() < deadline:
                running = {run: rank for rank, run in enumerate(self._runs) if rank not in self._ended}
                done, _ = self._ray.wait(list(running), num_returns=len(running), timeout=POLL_SECONDS)
                self._check_head(head)  # before other calls, which would wait for a lost head
                lead_was_running = 0 not in self._ended
                for run in done:
                    self._record_end(running[run], run)
                if lead_was_running:
                    self._show_output()
                failed = any(end.code for end in self._ended.values())
                if deadline == math.inf and (signals or failed):
                    deadline = time.monotonic() + GRACE_SECONDS
                    if signals:
                        self._stop(signals[0])
            self._stop(signal.SIGTERM)
        return self._failure(signals)

    def _record_end(self, rank: int, run: ObjectRef) -> None:
        try:
            self._ended[rank] = self._ray.get(run)
            self._details[rank] = ""
        except self._ray.exceptions.RayError as error:
            self._ended[rank] = EndedProcess(MACHINE_LOST, ())
            self._details[rank] = short_error(error)

    def _check_head(self, head: ClusterHead) -> None:
        if head.silent_for() <= HEAD_TIMEOUT:
            return
        self._stop(signal.SIGTERM)
        raise ClusterLost(
            f"The head of the Ray cluster at {head.address} does not answer any more, so the ranks were "
            "stopped. Start the cluster again; the same command then goes on from the last checkpoint."
        )

    def _show_output(self) -> None:
        """Print what rank 0 wrote."""
        try:
            lines = self._ray.get(self._launchers[0].take_output.remote(), timeout=OUTPUT_TIMEOUT)
        except self._ray.exceptions.RayError:
            return  # the end of its run says what happened
        for stream, line in lines:
            target = sys.stdout if stream == STDOUT else sys.stderr
            target.write(line)
        sys.stdout.flush()

    def _stop(self, signal_number: int) -> None:
        """Stop the ranks that still run."""
        stopping = []
        for rank, launcher in enumerate(self._launchers):
            if rank not in self._ended:
                stopping.append(launcher.stop.remote(signal_number))
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=GRACE_SECONDS)

    def _failure(self, signals: Sequence[int]) -> RankFailure | None:
        codes = {rank: end.code for rank, end in self._ended.items() if end.code}
        if not codes and len(self._ended) == self._world_size:
            return None
        if not codes:
            return RankFailure(0, self._world_size, -signals[0], interrupted=True)
        cause = first_cause(codes)
        return RankFailure(
            cause,
            self._world_size,
            codes[cause],
            self._machines[cause].host,
            self._ended[cause].lines,
            detail=self._details[cause],
            interrupted=bool(signals),
        )


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Yield the list of SIGINT and SIGTERM that arrive in the block; Ray's own handlers would leave ranks
    running."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
