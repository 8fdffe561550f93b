"""Many ranks on one machine: n processes of the same command, told apart by RANK as torchrun does it.

The process that starts them holds the meeting point (a TCPStore on a port of the system's choice, so no port can be in use
already) and watches: when one rank fails the others are ended, since they would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import torch

from strop.ranks import Ranks, SharedFailure
from strop.run.heartbeat import log_of
from strop.run.watchdog import HUNG
from strop.runtime.failure import WAITED, Loss, describe, first_cause
from strop.runtime.ray_agent import LAUNCHED
from strop.runtime.tail import Tail

GRACE = 10.0
"""Seconds the other ranks have to end by themselves after one has failed."""


def is_rank() -> bool:
    """Whether somebody (torchrun, or `launch`) started this process as one of many."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(command: Sequence[str], world: int, *, environment: Mapping[str, str] | None = None) -> int:
    """Run `command` as `world` ranks and wait; the exit code of the rank that failed first, or 0."""
    with tempfile.TemporaryDirectory(prefix="strop-ranks-") as folder:
        loss = run_ranks(command, world, Path(folder), environment=environment)
        if loss is None:
            return 0
        for line in describe(loss, Path(folder)):
            sys.stderr.write(f"strop: error: {line}\n")
        return loss.exit_code


def run_ranks(
    command: Sequence[str], world: int, directory: Path, *, environment: Mapping[str, str] | None = None
) -> Loss | None:
    """Run `command` as `world` ranks and wait; the rank that failed first, or None. `directory` is the run's folder."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the meeting point is ours; no rank opens one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world))),
        LAUNCHED: str(os.getpid()),
        **(environment or {}),
    }
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(world)
    ]
    tails = [
        Tail(cast(BinaryIO, process.stderr), sys.stderr.write, log_of(directory, rank)) for rank, process in enumerate(ranks)
    ]
    try:
        loss = _watch(ranks)
    finally:
        _end(ranks)
    return loss if loss is None else replace(loss, host=socket.gethostname(), lines=tails[loss.rank].last())


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> Loss | None:
    with _passed_on(ranks) as asked:
        while True:
            codes = [process.poll() for process in ranks]
            if any(codes):
                break
            if all(code == 0 for code in codes):
                return None
            time.sleep(0.05)
        deadline = time.monotonic() + GRACE
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        failed = {rank: process.returncode for rank, process in enumerate(ranks) if process.poll()}
    cause = first_cause(failed)
    if failed[cause] == HUNG:
        _ask_for_stacks(ranks)
    return Loss(cause, len(ranks), failed[cause], asked=bool(asked))


def _ask_for_stacks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Of those that are still there: who waits for whom can be read from all stacks together."""
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


@contextlib.contextmanager
def _passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """A signal to end goes to all ranks; each closes its files by itself. Yields the signals that came."""
    came: list[int] = []

    def forward(number: int, _: object) -> None:
        came.append(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in ranks if process.poll() is None]
        for process in alive:
            process.send_signal(number)
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE)


@contextlib.contextmanager
def joined(devices: int, device: torch.device, *, timeout: float) -> Iterator[Ranks]:
    """Inside the block this process is one rank of `devices`; a rank that does not answer for `timeout` seconds is an error."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != devices:
        raise ValueError(
            f"{world} ranks were started, but trainer.nnodes x trainer.n_gpus_per_node is {devices}. Set them to what was "
            "started, or start as many."
        )
    if device.type == "cuda":
        place = int(os.environ.get("LOCAL_RANK", rank))
        if place >= torch.cuda.device_count():
            raise ValueError(
                f"Rank {rank} is number {place} on this machine, which has {torch.cuda.device_count()} GPUs. "
                "Lower trainer.n_gpus_per_node."
            )
        torch.cuda.set_device(place)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if os.environ.get("MASTER_PORT") == "0":
        raise ValueError(
            f"Rank {rank} of {world} was told to meet the others at port 0 (MASTER_PORT), which is none. Start ranks of one "
            "machine by torchrun --standalone, which chooses a free port, or name one by --master-port."
        )
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=timeout),
        )
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"Rank {rank} of {world} cannot meet the others at {where} (MASTER_ADDR, MASTER_PORT). Is the port in use, or did "
            f"another rank not start? {str(error).splitlines()[0]}"
        ) from error
    try:
        yield Ranks(rank, world)
    except SharedFailure as failure:
        failure.told_by_another = rank != 0
        raise
    except RuntimeError as error:
        lost = _lost(rank, world, error)
        if lost is None:
            raise
        raise lost from error
    finally:
        dist.destroy_process_group()


def _lost(rank: int, world: int, error: RuntimeError) -> SharedFailure | None:
    """Other ranks are gone or late; what they said themselves is the news."""
    signs = ("Connection closed by peer", "Connection reset", "Timed out waiting", "timed out", "Timeout", "Broken pipe")
    text = str(error)
    if not any(sign in text for sign in signs):
        return None
    lost = SharedFailure(
        f"Rank {rank} of {world} waited for another rank in vain: it failed (see its message), or it took longer than "
        f"actor_rollout_ref.nccl_timeout. ({text.splitlines()[0][:200]})"
    )
    lost.told_by_another = rank != 0
    lost.exit_code = WAITED
    return lost
