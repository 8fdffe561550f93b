"""What to do when a rank fails: find the rank that failed first, describe the failure, restart the run."""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import CRASHED, ERROR_PREFIX, REFUSED, STOPPED
from strop.run.checkpoint.layout import LATEST, read_latest
from strop.run.heartbeat import FAILED, WorkerState, read_worker_states, stacks_file, worker_log_file
from strop.run.watchdog import HUNG, ORPHANED

log = logging.getLogger(__name__)

WAITED = 77
"""Exit code of a rank that waited for another one until the timeout."""
MACHINE_LOST = -1000
"""Takes the place of an exit code when the process is gone with its machine or its launcher."""
MAX_DETAIL_LINES = 5


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first."""

    rank: int
    world_size: int
    code: int
    """As subprocess gives it: a negative number is a signal."""
    host: str = ""
    last_lines: tuple[str, ...] = ()
    """The last lines of its output."""
    detail: str = ""
    """What is known beyond the exit code."""
    interrupted: bool = False
    """Whether the user ended the run."""
    shown: bool = False
    """Whether its output was printed as it came."""

    @property
    def restartable(self) -> bool:
        return not self.interrupted and self.code not in (REFUSED, STOPPED)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.code == MACHINE_LOST:
            return CRASHED
        if self.code < 0:
            return 128 - self.code
        return self.code


def first_cause(codes: Mapping[int, int]) -> int:
    """Return the rank that made the others fail, from the exit codes of all ranks that failed."""
    return min(codes, key=lambda rank: (_severity(codes[rank]), rank))


def _severity(code: int) -> int:
    """The lower, the more likely the code is the cause and not a consequence."""
    if code == MACHINE_LOST:
        return 0
    if code < 0:
        return 1
    if code == HUNG:
        return 2
    if code == CRASHED:
        return 3
    if code not in (WAITED, ORPHANED):
        return 4
    return 5


# --- describing a failure -----------------------------------------------------------------------------------


def describe(failure: RankFailure, directory: Path) -> list[str]:
    """Return the lines to print about a failure; none when the rank has printed everything itself."""
    if failure.interrupted or failure.code in (REFUSED, STOPPED):
        return []
    if failure.code == HUNG:
        return [_describe_hang(failure, directory)]
    if failure.shown and failure.last_lines and failure.last_lines[-1].startswith(ERROR_PREFIX):
        return []
    beat = _heartbeat_of(failure.rank, directory)
    lines = [
        f"Rank {failure.rank} of {failure.world_size} ({_place(failure, beat)}) "
        f"{_end(failure)}{_phase(beat)}; the others were stopped."
    ]
    if failure.detail:
        lines += failure.detail.strip().splitlines()[:MAX_DETAIL_LINES]
    log_file = worker_log_file(directory, failure.rank)
    if failure.shown and log_file.exists():
        lines.append(f"Its output is in {log_file}.")
    elif failure.last_lines:
        lines.append("Its last lines:")
        for line in failure.last_lines:
            lines.append(f"  {line}")
    return lines


def _heartbeat_of(rank: int, directory: Path) -> WorkerState | None:
    for beat in read_worker_states(directory):
        if beat.rank == rank:
            return beat
    return None


def _place(failure: RankFailure, beat: WorkerState | None) -> str:
    parts = []
    host = failure.host
    if not host and beat is not None:
        host = beat.host
    if host:
        parts.append(f"host {host}")
    if beat is not None:
        parts.append(f"process {beat.pid}")
    return ", ".join(parts) or "place unknown"


def _end(failure: RankFailure) -> str:
    if failure.code == MACHINE_LOST:
        return "was lost with its machine or its launcher"
    if failure.code == WAITED:
        return "waited for another rank in vain"
    if failure.code == ORPHANED:
        return "lost the process that started it"
    if failure.code < 0:
        return f"was ended by {signal.Signals(-failure.code).name}"
    return f"failed with exit code {failure.code}"


def _phase(beat: WorkerState | None) -> str:
    if beat is None:
        return " before its first heartbeat"
    return f" in phase {beat.phase.removeprefix(FAILED)!r} of step {beat.step}"


def _describe_hang(failure: RankFailure, directory: Path) -> str:
    beats = read_worker_states(directory)
    stacks: dict[int, str] = {}
    for beat in beats:
        stacks[beat.rank] = last_dump(stacks_file(directory, beat.rank))
    hanging = slowest(beats, stacks)
    named = " and ".join(map(str, hanging)) or f"rank {failure.rank}"
    others = ""
    if hanging and len(hanging) < len(beats):
        others = f"; {len(beats) - len(hanging)} other rank(s) waited for it"
    files = [str(stacks_file(directory, beat.rank)) for beat in hanging[:4]]
    place = ", ".join(files) or directory / "workers"
    return f"The run stood still: {named}{others}. Its stacks are in {place}."


def slowest(beats: Sequence[WorkerState], stacks: Mapping[int, str]) -> list[WorkerState]:
    """Return the ranks that all others wait for: those in the earliest step that are not in a collective."""
    if not beats:
        return []
    earliest_step = min(beat.step for beat in beats)
    behind = [beat for beat in beats if beat.step == earliest_step]
    busy = [beat for beat in behind if not is_in_collective(stacks.get(beat.rank, ""))]
    if busy and len(busy) < len(behind):
        return busy
    # The stacks do not tell them apart. The rank that is longest in its phase has entered no later one.
    longest = min(beat.since for beat in behind)
    return [beat for beat in behind if beat.since == longest]


def is_in_collective(stack: str) -> bool:
    """Return whether the main thread, which faulthandler writes last, is in a call of torch.distributed."""
    main_thread = stack.rstrip().rpartition("(most recent call first):")[2]
    return any("/torch/distributed/" in line for line in main_thread.splitlines()[:8])


def last_dump(path: Path) -> str:
    """Return the newest stacks of a file with several dumps."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return re.split(r"^--- ", text, flags=re.MULTILINE)[-1]


# --- restarts -----------------------------------------------------------------------------------------------

Attempt = Callable[[Sequence[str]], RankFailure | None]
"""Runs all ranks with further overrides after the user's own; the first failure, or None."""


def supervise(attempt: Attempt, directory: Path, max_restarts: int) -> int:
    """Run until an attempt succeeds or no restart is left; the exit code.

    A restart resumes from the newest checkpoint that the run itself has written.
    """
    overrides: list[str] = []
    for restarts_left in range(max_restarts, -1, -1):
        before = _newest_checkpoint(directory)
        failure = attempt(overrides)
        if failure is None:
            return 0
        for line in describe(failure, directory):
            sys.stderr.write(f"{ERROR_PREFIX}{line}\n")
        if not failure.restartable or not restarts_left:
            return failure.exit_code
        if _newest_checkpoint(directory) != before:
            overrides = ["trainer.resume_mode=auto"]  # also when the first attempt had resume_mode=disable
        step = read_latest(directory) if overrides else None
        origin = f"from step {step}" if step else "from where the run began"
        log.warning("Starting again %s; %d restart(s) left.", origin, restarts_left - 1)
    raise AssertionError("the last attempt returns")


def _newest_checkpoint(directory: Path) -> tuple[int | None, int]:
    """Return a value that changes with every checkpoint, also with one that overwrites an older one."""
    try:
        return read_latest(directory), (directory / LATEST).stat().st_mtime_ns
    except FileNotFoundError:
        return None, 0
