"""A run that is started again when a worker dies: from the newest checkpoint it made, as often as was allowed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from strop.run.layout import LATEST, read_latest
from strop.runtime.failure import Loss, describe

log = logging.getLogger(__name__)

Attempt = Callable[[Sequence[str]], Loss | None]
"""Runs all ranks with further settings behind the user's own; the rank that failed first, or None."""


def supervise(attempt: Attempt, directory: Path, max_restarts: int) -> int:
    """Run until it succeeds, or no restart is left; the exit code."""
    more: list[str] = []
    for left in range(max_restarts, -1, -1):
        before = _newest(directory)
        loss = attempt(more)
        if loss is None:
            return 0
        for line in describe(loss, directory):
            sys.stderr.write(f"strop: error: {line}\n")
        if not loss.restartable or not left:
            return loss.exit_code
        if _newest(directory) != before:
            more = ["trainer.resume_mode=auto"]  # whatever it began with, it goes on from what it made itself
        step = read_latest(directory) if more else None
        log.warning(
            "Starting again %s; %d restart(s) left.", f"from step {step}" if step else "from where the run began", left - 1
        )
    raise AssertionError("the last attempt returns")


def _newest(directory: Path) -> tuple[int | None, int]:
    """Changes with every checkpoint, also with one that takes the place of an older one."""
    try:
        return read_latest(directory), (directory / LATEST).stat().st_mtime_ns
    except FileNotFoundError:
        return None, 0
