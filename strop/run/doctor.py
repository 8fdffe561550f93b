"""`strop doctor RUN`: what every worker of a run is doing right now, and since when.

Reads the heartbeat of each worker and asks those on this machine for the stacks of their threads. It only looks: a run that is
well goes on as if nothing had happened.
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
from typing import Any

from strop.run.health import ALERTS, recorded
from strop.run.heartbeat import Beat, read_beats, stacks_of, workers_of

PATIENCE = 3.0
"""Seconds to wait for stacks; they are written by the signal handler, even when Python itself is stuck."""
SHOWN_FRAMES = 8
FRESH = 120.0
"""Seconds in one phase that nobody need worry about, where it is not known how long it usually takes."""
SHORT, LONG = 15.0, 10.0
"""Where it is: so many seconds, or so many times as long as usual."""
QUEUES = ("queue", "in_flight", "occupancy", "preemptions", "cache_use", "pending")
"""Parts of the names of metrics that say how much is waiting."""


@dataclass(frozen=True)
class Patient:
    beat: Beat
    state: str
    """running | gone | over | elsewhere | silent (it lives, but does not answer signals)"""
    stacks: str = ""
    """Stacks of all threads, the most recent call first."""

    @property
    def seconds(self) -> float:
        return time.time() - self.beat.since


@dataclass(frozen=True)
class Diagnosis:
    run: Path
    patients: list[Patient]
    last_step: int | None = None
    """Of the metrics."""
    last_seconds: float | None = None
    """Since that step was logged."""
    waiting: dict[str, float] = field(default_factory=dict)
    alerts: int = 0
    usual: dict[str, float] = field(default_factory=dict)
    """Seconds that phases take, by name."""

    def stands_still(self, patient: Patient) -> bool:
        usual = self.usual.get(patient.beat.phase)
        return patient.seconds > (FRESH if usual is None else max(SHORT, LONG * usual))

    @property
    def behind(self) -> Patient | None:
        """Whom the others wait for: earliest step, then longest in its phase."""
        running = [patient for patient in self.patients if patient.state in ("running", "silent", "elsewhere")]
        return min(running, key=lambda patient: (patient.beat.step, patient.beat.since), default=None)


def examine(run: Path, patience: float = PATIENCE) -> Diagnosis:
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder. Name the folder of a run (trainer.default_local_dir).")
    beats = read_beats(run)
    if not beats:
        raise ValueError(f"{workers_of(run)} has no heartbeat: no training has started here, or an old version did.")
    patients = [_see(run, beat, patience) for beat in beats]
    path = run / "metrics.jsonl"
    rows = list(recorded(path))
    last = rows[-1] if rows else None
    waiting = {} if last is None else {k: v for k, v in last[0].items() if isinstance(v, float) and _is_queue(k)}
    alerts = run / ALERTS
    return Diagnosis(
        run,
        patients,
        last_step=None if last is None else last[1],
        last_seconds=time.time() - path.stat().st_mtime if last is not None else None,
        waiting=waiting,
        alerts=len(alerts.read_text().splitlines()) if alerts.exists() else 0,
        usual=_usual([metrics for metrics, _ in rows]),
    )


def _usual(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How long phases take, each by the middle one of its times."""
    times: dict[str, list[float]] = {}
    for name, value in (pair for row in rows for pair in row.items()):
        if name.startswith("timing_s/") and isinstance(value, int | float):
            times.setdefault(name.removeprefix("timing_s/"), []).append(float(value))
    return {phase: median(found) for phase, found in times.items()}


def _is_queue(name: str) -> bool:
    return any(part in name for part in QUEUES) and not name.startswith("val-")


def _see(run: Path, beat: Beat, patience: float) -> Patient:
    if beat.over:
        return Patient(beat, "over")
    if beat.host != socket.gethostname():
        return Patient(beat, "elsewhere")
    if not _is_worker(beat):
        return Patient(beat, "gone")
    if not _listens(beat.pid):
        return Patient(beat, "silent")
    stacks = _stacks(stacks_of(run, beat.rank), beat.pid, patience)
    return Patient(beat, "running" if stacks else "silent", stacks)


def _is_worker(beat: Beat) -> bool:
    """Whether the process still lives, and is not another one that was given the same number later."""
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        ticks = int(Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):  # no Linux
        return True
    return booted + ticks / os.sysconf("SC_CLK_TCK") <= beat.since + 2


def _listens(pid: int) -> bool:
    """Whether it has a handler for the signal: one that has none would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _stacks(path: Path, pid: int, patience: float) -> str:
    """Ask for stacks and read what was added to the file."""
    before = path.stat().st_size if path.exists() else 0
    try:
        os.kill(pid, signal.SIGUSR1)
    except (ProcessLookupError, PermissionError):
        return ""
    deadline, size = time.monotonic() + patience, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = path.stat().st_size if path.exists() else 0
        if now > before and now == size:  # written, and nothing more is coming
            break
        size = now
    if size == before:
        return ""
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def main_thread(stacks: str) -> list[str]:
    """The latest calls of the main thread. faulthandler writes the newest thread first, so it is the last one."""
    main = re.split(r"\n(?=(?:Current thread|Thread) 0x)", stacks.strip())[-1]
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', main)
    return [f"{_short(file)}:{line} {name}" for file, line, name in frames]


def _short(path: str) -> str:
    """From the package on, which says enough."""
    for mark in ("/site-packages/", "/lib/python"):
        if mark in path:
            return path.rpartition(mark)[2]
    return "/".join(path.split("/")[-3:])


def render(found: Diagnosis) -> str:
    lines = [f"run {found.run}"]
    if found.last_step is not None:
        lines.append(f"last logged step: {found.last_step}, {duration(found.last_seconds or 0)} ago")
    if found.alerts:
        lines.append(f"alerts: {found.alerts}, see {found.run / ALERTS}")
    if found.waiting:
        lines.append("waiting: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.waiting.items())))
    for patient in found.patients:
        beat = patient.beat
        lines.append(
            f"rank {beat.rank} of {beat.world} on {beat.host}, process {beat.pid}: {patient.state}, step {beat.step}, "
            f"phase {beat.phase!r} for {duration(patient.seconds)}"
        )
        lines += [f"    {frame}" for frame in main_thread(patient.stacks)[:SHOWN_FRAMES]]
        if patient.stacks:
            lines.append(f"    all threads: {stacks_of(found.run, beat.rank)}")
    return "\n".join([*lines, conclusion(found)]) + "\n"


def conclusion(found: Diagnosis) -> str:
    """In one sentence, what to make of it."""
    gone = [patient for patient in found.patients if patient.state == "gone"]
    failed = [patient.beat for patient in found.patients if patient.beat.failed]
    told = [f"The run failed: {', '.join(map(str, failed))}."] if failed else []
    if gone:
        who = ", ".join(str(patient.beat.rank) for patient in gone)
        told.append(f"The process of rank {who} is gone without a word (killed, or out of memory).")
        return " ".join([*told, "The same command resumes the run."])
    if failed:
        stacks = stacks_of(found.run, failed[0].rank)
        told += [f"Its last stacks are in {stacks}."] if stacks.exists() and stacks.stat().st_size else []
        return " ".join(told)
    if all(patient.state == "over" for patient in found.patients):
        return "The run is over: " + ", ".join(sorted({patient.beat.phase for patient in found.patients})) + "."
    behind = found.behind
    assert behind is not None
    if not found.stands_still(behind):
        return "It moves: nothing has stood still for long."
    peers = [patient for patient in found.patients if patient is not behind and patient.beat.step >= behind.beat.step]
    others = {patient.beat.phase for patient in peers}
    waits = f" The others wait in {', '.join(sorted(others))}." if others - {behind.beat.phase} else ""
    usual = found.usual.get(behind.beat.phase)
    than = "" if usual is None else f", which usually takes {usual:.2g} s"
    where = "" if behind.state != "elsewhere" else f" Run this command on {behind.beat.host} for its stacks."
    return (
        f"Rank {behind.beat.rank} has been in {behind.beat.phase!r} of step {behind.beat.step} for "
        f"{duration(behind.seconds)}{than}; its stack says where.{waits}{where}"
    )


def duration(seconds: float) -> str:
    """
    >>> duration(5.2), duration(130), duration(7300)
    ('5 s', '2 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="strop doctor", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (trainer.default_local_dir)")
    asked = parser.parse_args(list(arguments))
    found = examine(asked.run)
    sys.stdout.write(render(found))
    return 0 if well(found) else 1


def well(found: Diagnosis) -> bool:
    """Whether nobody is gone or has failed, and everybody moves or is done."""
    if any(patient.state == "gone" or patient.beat.failed for patient in found.patients):
        return False
    return found.behind is None or not found.stands_still(found.behind)
