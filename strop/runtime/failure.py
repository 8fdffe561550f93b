"""How a rank took a run down with it: which one it was, where, in which phase, and whether trying again makes sense."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import CRASHED, REFUSED
from strop.run.heartbeat import FAILED, Beat, read_beats, stacks_of
from strop.run.watchdog import HUNG, ORPHANED

WAITED = 77
"""Exit code of a rank that waited for another in vain."""
MACHINE_LOST = -1000
"""Instead of an exit code: the process is gone with its machine, or with whatever started it there."""


@dataclass(frozen=True)
class Loss:
    """The rank that ended first."""

    rank: int
    world: int
    code: int
    """As subprocess gives it: a negative number is a signal."""
    host: str = ""
    lines: tuple[str, ...] = ()
    """The last it wrote."""
    why: str = ""
    """What is known beyond the code."""
    asked: bool = False
    """Whether a person ended the run."""

    @property
    def restartable(self) -> bool:
        return not self.asked and self.code != REFUSED

    @property
    def exit_code(self) -> int:
        if self.code == MACHINE_LOST:
            return CRASHED
        return 128 - self.code if self.code < 0 else self.code


def first_cause(codes: Mapping[int, int]) -> int:
    """The rank that the others fell over, by the exit codes of those that failed."""

    def weight(rank: int) -> tuple[int, int]:
        code = codes[rank]
        order = [code == MACHINE_LOST, code < 0, code == HUNG, code == CRASHED, code not in (WAITED, ORPHANED)]
        return (order.index(True) if True in order else len(order), rank)

    return min(codes, key=weight)


def describe(loss: Loss, directory: Path) -> list[str]:
    """What to tell about a loss, a line each; nothing where the rank has told it all."""
    if loss.asked or loss.code == REFUSED:
        return []
    beat = next((beat for beat in read_beats(directory) if beat.rank == loss.rank), None)
    if loss.code == HUNG:
        return [_hang(loss, directory)]
    said = f"Rank {loss.rank} of {loss.world} ({_place(loss, beat)}) {_end(loss)}{_phase(beat)}; the others were stopped."
    found = [said] if not loss.why else [said, *loss.why.strip().splitlines()[:5]]
    if loss.lines:
        found += ["Its last lines:", *(f"  {line}" for line in loss.lines)]
    return found


def _place(loss: Loss, beat: Beat | None) -> str:
    host = loss.host or (beat.host if beat else "")
    return ", ".join(word for word in (host and f"host {host}", beat and f"process {beat.pid}") if word) or "place unknown"


def _end(loss: Loss) -> str:
    if loss.code == MACHINE_LOST:
        return "was lost with its machine or its starter"
    if loss.code == WAITED:
        return "waited for another rank in vain"
    if loss.code == ORPHANED:
        return "lost the process that started it"
    return f"was ended by {signal.Signals(-loss.code).name}" if loss.code < 0 else f"failed with exit code {loss.code}"


def _phase(beat: Beat | None) -> str:
    if beat is None:
        return " before it said where it is"
    return f" in phase {beat.phase.removeprefix(FAILED)!r} of step {beat.step}"


def _hang(loss: Loss, directory: Path) -> str:
    beats = read_beats(directory)
    slow = slowest(beats, {beat.rank: last_dump(stacks_of(directory, beat.rank)) for beat in beats})
    named = " and ".join(str(beat) for beat in slow) or f"rank {loss.rank}"
    others = f"; {len(beats) - len(slow)} other rank(s) waited for it" if slow and len(slow) < len(beats) else ""
    stacks = ", ".join(str(stacks_of(directory, beat.rank)) for beat in slow[:4])
    return f"The run stood still: {named}{others}. Its stacks are in {stacks or directory / 'workers'}."


def slowest(beats: Sequence[Beat], stacks: Mapping[int, str]) -> list[Beat]:
    """The ranks that everybody waits for: those furthest behind, and of these the ones that do not wait for others."""
    if not beats:
        return []
    behind = min(beat.step for beat in beats)
    there = [beat for beat in beats if beat.step == behind]
    busy = [beat for beat in there if not waits_for_others(stacks.get(beat.rank, ""))]
    if busy and len(busy) < len(there):
        return busy
    earliest = min(beat.since for beat in there)  # the one that has been longest in its phase entered no later one
    return [beat for beat in there if beat.since == earliest]


def waits_for_others(stack: str) -> bool:
    """Whether the main thread, which faulthandler writes last, is inside an exchange between ranks."""
    main = stack.rstrip().rpartition("(most recent call first):")[2]
    return any("/torch/distributed/" in line for line in main.splitlines()[:8])


def last_dump(path: Path) -> str:
    """The newest stacks in a file of several."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return re.split(r"^--- ", text, flags=re.MULTILINE)[-1]
