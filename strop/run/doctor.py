"""`strop doctor RUN`: what every worker of a run is doing now, and for how long.

Reads the heartbeat of each worker and asks those on this machine for the stacks of their threads. It only
reads: a healthy run is not disturbed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from strop.run.health.monitor import ALERTS, read_metrics
from strop.run.heartbeat import WorkerState, read_worker_states, stacks_file, workers_folder

STACKS_TIMEOUT = 3.0
"""Seconds to wait for stacks; a signal handler writes them, even when Python itself is stuck."""
SHOWN_FRAMES = 8
UNKNOWN_PHASE_LIMIT = 120.0
"""Seconds in one phase that are no cause for concern where its usual duration is unknown."""
MINIMUM_STALL = 15.0
STALL_FACTOR = 10.0
"""Where the usual duration is known: a stall takes at least so many seconds, and so many times as long."""
QUEUE_METRICS = ("queue", "in_flight", "occupancy", "preemptions", "cache_use", "pending")
"""Parts of the names of metrics that say how much work is waiting."""
ALIVE = ("running", "silent", "elsewhere")


@dataclass(frozen=True)
class WorkerReport:
    """A worker's last heartbeat, and whether its process is alive."""

    worker: WorkerState
    status: str
    """running | gone | over | elsewhere (another machine) | silent (alive, but does not answer signals)"""
    stacks: str = ""
    """Stacks of all threads, the most recent call first."""

    @property
    def seconds_in_phase(self) -> float:
        return time.time() - self.worker.since


@dataclass(frozen=True)
class RunDiagnosis:
    """Everything that the report of a run is made of."""

    run: Path
    workers: list[WorkerReport]
    last_step: int | None = None
    """The last step in the metrics."""
    seconds_since_step: float | None = None
    """Seconds since that step was logged."""
    queues: dict[str, float] = field(default_factory=dict)
    """The latest metrics that say how much work is waiting."""
    alerts: int = 0
    usual_seconds: dict[str, float] = field(default_factory=dict)
    """The usual duration of each phase."""

    def is_stalled(self, report: WorkerReport) -> bool:
        """Whether a worker has been in its phase for much longer than usual."""
        usual = self.usual_seconds.get(report.worker.phase)
        limit = UNKNOWN_PHASE_LIMIT
        if usual is not None:
            limit = max(MINIMUM_STALL, STALL_FACTOR * usual)
        return report.seconds_in_phase > limit

    @property
    def slowest(self) -> WorkerReport | None:
        """The worker that the others wait for: earliest step, then longest in its phase."""
        alive = [report for report in self.workers if report.status in ALIVE]
        return min(alive, key=lambda report: (report.worker.step, report.worker.since), default=None)


def diagnose(run: Path, timeout: float = STACKS_TIMEOUT) -> RunDiagnosis:
    """Read the heartbeats, metrics and alerts of a run, and ask its local workers for their stacks."""
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder. Name the folder of a run (trainer.default_local_dir).")
    workers = read_worker_states(run)
    if not workers:
        raise ValueError(
            f"{workers_folder(run)} has no heartbeat: no training has started here, or an old version did."
        )
    reports = [_inspect(run, worker, timeout) for worker in workers]
    path = run / "metrics.jsonl"
    rows = list(read_metrics(path))
    last_step: int | None = None
    seconds: float | None = None
    queues: dict[str, float] = {}
    if rows:
        metrics, last_step = rows[-1]
        seconds = time.time() - path.stat().st_mtime
        queues = _queue_metrics(metrics)
    alerts = 0
    if (run / ALERTS).exists():
        alerts = len((run / ALERTS).read_bytes().splitlines())
    return RunDiagnosis(run, reports, last_step, seconds, queues, alerts, _usual_seconds(rows))


def _usual_seconds(rows: Sequence[tuple[Mapping[str, object], int]]) -> dict[str, float]:
    """The median duration of each phase."""
    times: dict[str, list[float]] = {}
    for metrics, _ in rows:
        for name, value in metrics.items():
            if name.startswith("timing_s/") and isinstance(value, int | float):
                times.setdefault(name.removeprefix("timing_s/"), []).append(float(value))
    return {phase: median(seconds) for phase, seconds in times.items()}


def _queue_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        if isinstance(value, float) and _is_queue_metric(name):
            found[name] = value
    return found


def _is_queue_metric(name: str) -> bool:
    return any(part in name for part in QUEUE_METRICS) and not name.startswith("val-")


def _inspect(run: Path, worker: WorkerState, timeout: float) -> WorkerReport:
    if worker.over:
        return WorkerReport(worker, "over")
    if worker.host != socket.gethostname():
        return WorkerReport(worker, "elsewhere")
    if not is_alive(worker):
        return WorkerReport(worker, "gone")
    if not _handles_signal(worker.pid):
        return WorkerReport(worker, "silent")
    stacks = _request_stacks(stacks_file(run, worker.rank), worker.pid, timeout)
    return WorkerReport(worker, "running" if stacks else "silent", stacks)


def is_alive(worker: WorkerState) -> bool:
    """Whether the process still runs, and is not another one that got the same process id later."""
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        ticks = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[19])
        booted = _boot_time()
    except (OSError, ValueError, IndexError):  # no Linux
        return True
    return booted + ticks / os.sysconf("SC_CLK_TCK") <= worker.since + 2


def _boot_time() -> int:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime"):
            return int(line.split()[1])
    raise ValueError("/proc/stat has no line btime")


def _handles_signal(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1: one without would be killed by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _request_stacks(path: Path, pid: int, timeout: float) -> str:
    """Ask a process for its stacks and read what it adds to the file."""
    before = _size(path)
    try:
        os.kill(pid, signal.SIGUSR1)
    except (ProcessLookupError, PermissionError):
        return ""
    deadline = time.monotonic() + timeout
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = _size(path)
        if now > before and now == size:  # written, and nothing more is coming
            break
        size = now
    if size == before:
        return ""
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def main_thread(stacks: str) -> list[str]:
    """The latest calls of the main thread. faulthandler writes the newest thread first, so it is the last
    one."""
    main = re.split(r"\n(?=(?:Current thread|Thread) 0x)", stacks.strip())[-1]
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', main)
    return [f"{_short_path(file)}:{line} {name}" for file, line, name in frames]


def _short_path(path: str) -> str:
    """The path from the package on."""
    for mark in ("/site-packages/", "/lib/python"):
        if mark in path:
            return path.rpartition(mark)[2]
    return "/".join(path.split("/")[-3:])


def render(found: RunDiagnosis) -> str:
    """The report of a run as text."""
    lines = [f"run {found.run}"]
    if found.last_step is not None:
        lines.append(f"last logged step: {found.last_step}, {duration(found.seconds_since_step or 0)} ago")
    if found.alerts:
        lines.append(f"alerts: {found.alerts}, see {found.run / ALERTS}")
    if found.queues:
        values = [f"{name} {value:.4g}" for name, value in sorted(found.queues.items())]
        lines.append("waiting: " + ", ".join(values))
    for report in found.workers:
        worker = report.worker
        lines.append(
            f"rank {worker.rank} of {worker.world} on {worker.host}, process {worker.pid}: {report.status}, "
            f"step {worker.step}, phase {worker.phase!r} for {duration(report.seconds_in_phase)}"
        )
        for frame in main_thread(report.stacks)[:SHOWN_FRAMES]:
            lines.append(f"    {frame}")
        if report.stacks:
            lines.append(f"    all threads: {stacks_file(found.run, worker.rank)}")
    lines.append(conclusion(found))
    return "\n".join(lines) + "\n"


def conclusion(found: RunDiagnosis) -> str:
    """What the report means, in one or two sentences."""
    gone: list[str] = []
    failed: list[WorkerState] = []
    for report in found.workers:
        if report.status == "gone":
            gone.append(str(report.worker.rank))
        if report.worker.failed:
            failed.append(report.worker)
    sentences = []
    if failed:
        sentences.append(f"The run failed: {', '.join(map(str, failed))}.")
    if gone:
        sentences.append(
            f"The process of rank {', '.join(gone)} ended without a message (killed, or out of memory)."
        )
        sentences.append("The same command resumes the run.")
        return " ".join(sentences)
    if failed:
        stacks = stacks_file(found.run, failed[0].rank)
        if _size(stacks):
            sentences.append(f"Its last stacks are in {stacks}.")
        return " ".join(sentences)
    if all(report.status == "over" for report in found.workers):
        phases = {report.worker.phase for report in found.workers}
        return f"The run is over: {', '.join(sorted(phases))}."
    slowest = found.slowest
    assert slowest is not None
    if not found.is_stalled(slowest):
        return "It moves: nothing has stood still for long."
    return _describe_stall(found, slowest)


def _describe_stall(found: RunDiagnosis, slowest: WorkerReport) -> str:
    worker = slowest.worker
    text = f"Rank {worker.rank} has been in {worker.phase!r} of step {worker.step} for "
    text += duration(slowest.seconds_in_phase)
    usual = found.usual_seconds.get(worker.phase)
    if usual is not None:
        text += f", which usually takes {usual:.2g} s"
    text += "; its stack says where."
    waiting = set()
    for report in found.workers:
        if report is not slowest and report.worker.step >= worker.step:
            waiting.add(report.worker.phase)
    if waiting - {worker.phase}:
        text += f" The others wait in {', '.join(sorted(waiting))}."
    if slowest.status == "elsewhere":
        text += f" Run this command on {worker.host} for its stacks."
    return text


def duration(seconds: float) -> str:
    """
    >>> duration(5.2), duration(130), duration(7300)
    ('5 s', '2 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def main(arguments: Sequence[str]) -> int:
    """The command `strop doctor`; the exit code is 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="strop doctor", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (trainer.default_local_dir)")
    options = parser.parse_args(list(arguments))
    found = diagnose(options.run)
    sys.stdout.write(render(found))
    return 0 if is_healthy(found) else 1


def is_healthy(found: RunDiagnosis) -> bool:
    """Whether no worker is gone, has failed or stands still."""
    for report in found.workers:
        if report.status == "gone" or report.worker.failed:
            return False
    return found.slowest is None or not found.is_stalled(found.slowest)
