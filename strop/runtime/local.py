"""Many ranks on one machine: n processes of the same command, which differ in RANK, as with torchrun.

The launcher hosts the rendezvous store, on a port that the system chooses, so the port cannot be in use. It
watches the ranks: when one fails, the others are stopped, since they would wait for it for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import torch

from strop.errors import exit_code
from strop.ranks import Ranks, SharedFailure
from strop.run.heartbeat import read_worker_states, worker_log_file
from strop.run.watchdog import HUNG
from strop.runtime.failure import WAITED, RankFailure, describe, first_cause
from strop.runtime.launch import LAUNCHED, OutputTail, omp_threads_per_rank
from strop.stopping import SignalLog

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
POLL_SECONDS = 0.05
FIRST_REPORT_SECONDS = 5.0
MAX_REPORT_SECONDS = 60.0
MAX_PHASES = 8
"""Of the reports while ranks start: the first, the longest pause, and how many ranks are named."""
STACK_SECONDS = 0.5
"""Seconds in which ranks write their stacks."""
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset",
    "Timed out waiting",
    "timed out",
    "Timeout",
    "Broken pipe",
)
"""Parts of the errors of torch.distributed when another rank is gone or late."""

RankProcess = subprocess.Popen[bytes]


def is_rank() -> bool:
    """Return whether this process was started as one rank of many, by torchrun or by `launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(command: Sequence[str], world: int, *, environment: Mapping[str, str] | None = None) -> int:
    """Run `command` as `world` ranks and wait; the exit code of the rank that failed first, or 0."""
    with tempfile.TemporaryDirectory(prefix="strop-ranks-") as folder:
        failure = run_ranks(command, world, Path(folder), environment=environment)
        if failure is None:
            return 0
        for line in describe(failure, Path(folder)):
            sys.stderr.write(f"strop: error: {line}\n")
        return failure.exit_code


def run_ranks(
    command: Sequence[str],
    world: int,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 0.0,
) -> RankFailure | None:
    """Run `command` as `world` ranks and wait; the failure that came first, or None. `directory` is the run's
    folder; `grace`: the seconds that ranks may take to end after a signal."""
    start = StartReport(world, directory)
    started = start_ranks(command, world, directory, environment=environment)
    try:
        failure = _watch(started.processes, start, grace)
    finally:
        started.end()
    if failure is None:
        return None
    last_lines = started.tails[failure.rank].last_lines()
    return replace(failure, host=socket.gethostname(), last_lines=last_lines, shown=True)


@dataclass(frozen=True)
class StartedRanks:
    """The processes of ranks."""

    processes: list[RankProcess]
    tails: list[OutputTail]
    """What each writes to stderr."""
    store: object
    """The rendezvous store, which must exist as long as they do."""

    def end(self) -> None:
        """Terminate the ranks that still run."""
        _end(self.processes)


def start_ranks(
    command: Sequence[str], world: int, directory: Path, *, environment: Mapping[str, str] | None = None
) -> StartedRanks:
    """Start `command` as `world` ranks; `directory` gets what they write."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is hosted here; no rank hosts one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", omp_threads_per_rank(world)),
        LAUNCHED: str(os.getpid()),
        **(environment or {}),
    }
    ranks = []
    for rank in range(world):
        variables = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(start_rank(command, variables))
    tails = []
    for rank, process in enumerate(ranks):
        stderr = cast(BinaryIO, process.stderr)
        tails.append(OutputTail(stderr, sys.stderr.write, worker_log_file(directory, rank)))
    return StartedRanks(ranks, tails, store)


def start_rank(command: Sequence[str], variables: Mapping[str, str]) -> RankProcess:
    """Start one rank with these environment variables; the launcher reads its error output."""
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE)


class StartReport:
    """Logs where the ranks are until one has begun a step: they import libraries and build models,
    which can take minutes where processes share few cores."""

    def __init__(self, world: int, directory: Path) -> None:
        self._world = world
        self._directory = directory
        self._start = time.monotonic()
        self._began = time.time()
        self._next: float | None = FIRST_REPORT_SECONDS
        cores = len(os.sched_getaffinity(0))
        shared = ""
        if cores < world:
            shared = f" They share {cores} CPU core{'s' * (cores > 1)}, so this takes longer."
        log.info(
            "Starting %d ranks on this machine; each imports its libraries and builds its models.%s What "
            "they write: %s",
            world,
            shared,
            worker_log_file(directory, 0).parent,
        )

    def poll(self) -> None:
        """Log a line if it is time for one."""
        seconds = time.monotonic() - self._start
        if self._next is None or seconds < self._next:
            return
        self._next = min(2 * self._next, self._next + MAX_REPORT_SECONDS)
        phases: list[str] = []
        for state in read_worker_states(self._directory):
            if state.since >= self._began and state.rank < self._world:
                phases.append(f"rank {state.rank} {state.phase}, step {state.step}")
                if state.step >= 1:
                    self._next = None  # from here on the steps themselves are logged
        waiting = self._world - len(phases)
        if waiting:
            phases.append(f"{waiting} importing libraries")
        if self._next is not None:
            log.info("After %d s the ranks are starting: %s.", seconds, "; ".join(phases[:MAX_PHASES]))


def _watch(ranks: Sequence[RankProcess], start: StartReport, grace: float) -> RankFailure | None:
    """Wait until all ranks have ended, or one has failed and the others had time to end. After a signal they
    have `grace` seconds to save their state; a second one kills them."""
    with _forward_signals(ranks) as signals:
        last = math.inf
        while True:
            codes = [process.poll() for process in ranks]
            if any(codes):
                break
            if all(code == 0 for code in codes):
                return None
            start.poll()
            if signals and last == math.inf:
                last = time.monotonic() + grace + GRACE_SECONDS
            if len(signals) > 1 or time.monotonic() > last:
                for process in _running(ranks):
                    process.kill()
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + GRACE_SECONDS
        if signals:  # also if it came since the last look at them
            deadline = min(last, time.monotonic() + grace + GRACE_SECONDS)
        while _running(ranks) and time.monotonic() < deadline:
            if len(signals) > 1:
                for process in _running(ranks):
                    process.kill()
            time.sleep(POLL_SECONDS)
        failed: dict[int, int] = {}
        for rank, process in enumerate(ranks):
            if process.poll():
                failed[rank] = process.returncode
    cause = first_cause(failed)
    if failed[cause] == HUNG:
        _dump_stacks(ranks)
    code = failed[cause]
    if signals and code == -signal.SIGKILL:
        code = -signals[0]  # they were killed here, because of the signal
    return RankFailure(cause, len(ranks), code, interrupted=bool(signals))


def _running(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    return [process for process in ranks if process.poll() is None]


def _dump_stacks(ranks: Sequence[RankProcess]) -> None:
    """Make the running ranks write their stacks: all stacks together show which rank waits for which."""
    for process in _running(ranks):
        process.send_signal(signal.SIGUSR1)
    time.sleep(STACK_SECONDS)


@contextlib.contextmanager
def _forward_signals(ranks: Sequence[RankProcess]) -> Iterator[list[int]]:
    """Forward SIGINT and SIGTERM to all ranks, which close their files themselves. Yields the signals that
    came."""
    received = SignalLog()

    def forward(number: int, _: object) -> None:
        if received.add(number) and len(received.numbers) == 1:
            for process in _running(ranks):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received.numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[RankProcess]) -> None:
    """Terminate the ranks that still run; kill those that do not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = _running(ranks)
        for process in alive:
            process.send_signal(number)
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)


# --- in a rank ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(devices: int, device: torch.device, *, timeout: float) -> Iterator[Ranks]:
    """Join the process group of `devices` ranks while the block lasts; a rank that does not answer for
    `timeout` seconds is an error."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if world != devices:
        raise ValueError(
            f"{world} ranks were started, but trainer.nnodes x trainer.n_gpus_per_node is {devices}. Set "
            "them to what was started, or start as many. Without torchrun, unset RANK and WORLD_SIZE."
        )
    if device.type == "cuda":
        _set_device(rank)
    _init_process_group(rank, world, device, timeout)
    with _leaving(device):
        try:
            yield Ranks(rank, world)
        except SharedFailure as failure:
            failure.reported_by_other_rank = rank != 0
            raise
        except RuntimeError as error:
            lost = _lost_rank(rank, world, error)
            if lost is None:
                raise
            raise lost from error


@contextlib.contextmanager
def _leaving(device: torch.device) -> Iterator[None]:
    """Leave the process group after the block. After a failure NCCL is left alone: both ways to leave it may
    wait for the other ranks, which may wait for this one."""
    import torch.distributed as dist

    failed = False
    try:
        yield
    except Exception as error:
        failed = True
        if device.type == "cuda":
            atexit.register(end_at_once, exit_code(error))
        raise
    finally:
        if not failed or device.type != "cuda":
            dist.destroy_process_group()


def end_at_once(code: int) -> None:
    """End this process, after everything was reported, without the destructors of libraries."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_device(rank: int) -> None:
    """Select the GPU of this rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"Rank {rank} is number {local_rank} on this machine, which has {torch.cuda.device_count()} "
            "GPUs. Lower trainer.n_gpus_per_node."
        )
    torch.cuda.set_device(local_rank)


def _init_process_group(rank: int, world: int, device: torch.device, timeout: float) -> None:
    import torch.distributed as dist

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world} are set, as torchrun does, but not {' and '.join(missing)}. "
            "Start the ranks with torchrun, or unset RANK and WORLD_SIZE."
        )
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if os.environ.get("MASTER_PORT") == "0":
        raise ValueError(
            f"Rank {rank} of {world} has MASTER_PORT=0, but port 0 is no port at which ranks can meet. "
            "Start ranks of one machine by torchrun --standalone, which chooses a free port, or name one by "
            "--master-port."
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"Rank {rank} of {world} cannot meet the others at {address} (MASTER_ADDR, MASTER_PORT). Is the "
            f"port in use, or did another rank not start? {str(error).splitlines()[0]}"
        ) from error


def _lost_rank(rank: int, world: int, error: RuntimeError) -> SharedFailure | None:
    """Return the failure of a rank that lost another one; None when the error means something else."""
    text = str(error)
    if not any(sign in text for sign in LOST_CONNECTION):
        return None
    lost = SharedFailure(
        f"Rank {rank} of {world} waited for another rank in vain: it failed (see its message), or it took "
        f"longer than actor_rollout_ref.nccl_timeout. ({text.splitlines()[0][:200]})"
    )
    lost.reported_by_other_rank = rank != 0  # the other rank's own message says what happened
    lost.exit_code = WAITED
    return lost
