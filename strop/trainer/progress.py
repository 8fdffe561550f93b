"""How far a job is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Counts items of a known total; `tokens` give a speed beside."""

    def __init__(self, what: str, total: int, *, done: int = 0, unit: str = "items"):
        """`done` items were finished before this process."""
        self.what, self.total, self.unit = what, total, unit
        self.done, self.fresh, self.tokens = done, 0, 0
        self.start = self.said = time.monotonic()
        self.bar = _bar(what, total, done, unit)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, count: int, tokens: int = 0) -> None:
        self.done, self.fresh, self.tokens = self.done + count, self.fresh + count, self.tokens + tokens
        now = time.monotonic()
        speed = f"{self.tokens / max(now - self.start, 1e-9):.0f} tokens/s" if self.tokens else ""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, speed=speed)
        elif now - self.said >= SECONDS_BETWEEN_LINES and self.done < self.total:
            self.said = now
            left = (now - self.start) / self.fresh * (self.total - self.done)
            log.info(
                "%s: %d of %d %s, %s%.0f s left", self.what, self.done, self.total, self.unit, speed and speed + ", ", left
            )


def _bar(what: str, total: int, done: int, unit: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    console = Console(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    bar = RichProgress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TextColumn(unit),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=600,
    )
    bar.add_task(what, total=total, completed=done, speed="")
    return bar
