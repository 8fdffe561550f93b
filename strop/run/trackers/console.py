"""The `console` tracker: a live view on a terminal, elsewhere a line per step.

The live view and the short line show progress, time left and the most important metrics. The full line has
all metrics in verl's format.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from strop.run.trackers.base import Metrics, Rows, TrackedRun

# Label -> metrics that may fill it, the first that is there wins.
SHOWN: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "loss": ("train/loss",),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "entropy": ("actor/entropy",),
    "response length": ("response_length/mean",),
    "tokens/s": ("perf/throughput",),
}
IN_A_LINE = ("reward", "loss", "response length", "KL")
"""The labels of SHOWN that a short line has."""
SECONDS = "timing_s/step"
VALIDATION = ("val-core/", "val/")
OF_A_SAMPLE = ("input", "output", "gts", "score")
"""Fields of a validation sample; the other loggers have all of them."""
"""Prefixes of validation metrics. Only the first is left out of labels: `val/loss` is not `loss`."""
_BARS = "▁▂▃▄▅▆▇█"


class LiveView:
    """A panel at the bottom of a terminal, updated in place."""

    def __init__(self, console: Console, *, title: str, total: int | None, start: int = 0):
        """`start` is the step a resumed run comes from: only what this process does counts for the time
        left."""
        self.console = console
        self.title = title
        self.history: dict[str, deque[float]] = {}
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            # A step takes minutes, so the speed of the last half minute, rich's default, would often be of no
            # step at all.
            TimeRemainingColumn(),
            console=console,
            expand=True,
            speed_estimate_period=3600,
        )
        self.task = self.progress.add_task("step", total=total, completed=start)
        self.live = Live(self._panel(), console=console, refresh_per_second=2, transient=False)
        self.live.start()

    @classmethod
    def on_terminal(cls, stream: TextIO, *, title: str, total: int | None, start: int = 0) -> LiveView | None:
        """A view, or None where the stream is no terminal that can move its cursor."""
        console = Console(file=stream)
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        return cls(console, title=title, total=total, start=start)

    def update(self, metrics: Mapping[str, float | str], step: int) -> None:
        for label, value in shown(metrics).items():
            self.history.setdefault(label, deque(maxlen=40)).append(value)
        self.progress.update(self.task, completed=step)
        self.live.update(self._panel())

    def print(self, text: str) -> None:
        """A line above the view."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.live.update(self._panel(), refresh=True)
        self.live.stop()

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for label, values in self.history.items():
            table.add_row(Text(label), f"{values[-1]:.4g}", sparkline(values))
        return Panel(Group(self.progress, table), title=Text(self.title))


def shown(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """The numbers to show, by label: those of SHOWN, then what validation says.

    >>> shown({"actor/ppo_kl": 0.01, "actor/kl_loss": 0.2, "actor/lr": 1e-6, "val-core/gsm8k/acc": 0.5})
    {'KL': 0.2, 'gsm8k/acc': 0.5}
    >>> shown({"train/loss": 0.3, "val/loss": 0.5})
    {'loss': 0.3, 'val/loss': 0.5}
    """
    found = {}
    for label, keys in SHOWN.items():
        value = next((metrics[key] for key in keys if key in metrics), None)
        if isinstance(value, int | float):
            found[label] = float(value)
    for key, value in metrics.items():
        if key.startswith(VALIDATION) and isinstance(value, int | float):
            found[key.removeprefix(VALIDATION[0])] = float(value)
    return found


def sparkline(values: Sequence[float]) -> str:
    """A curve of one character per value; values that are not finite are gaps.

    >>> sparkline([0, 1, 2, 7, float("nan")])
    '▁▂▃█ '
    """
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return " " * len(values)
    low = min(finite)
    span = (max(finite) - low) or 1.0
    text = ""
    for value in values:
        is_finite = abs(value) < float("inf")
        text += _BARS[round((value - low) / span * 7)] if is_finite else " "
    return text


class ConsoleTracker:
    """Writes metrics and samples to a stream, and updates the live view where it is a terminal."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stream = stream or sys.stdout
        self.full = run.console == "full"
        self.start = run.resumed_from or 0
        self.total = run.total_steps
        self.clock = clock
        self.began = clock()
        self.live = LiveView.on_terminal(
            self.stream, title=f"{run.project} / {run.experiment}", total=run.total_steps, start=self.start
        )

    def log(self, metrics: Metrics, step: int) -> None:
        if self.full:
            self._write(line(metrics, step))
        elif self.live is None:
            self._write(short_line(metrics, step, self.total, self._seconds_left(step)))
        if self.live is not None:
            self.live.update(metrics, step)

    def _seconds_left(self, step: int) -> float | None:
        """By the mean time of the steps of this process. None before the first step and without a total."""
        done = step - self.start
        if done <= 0:
            self.began = self.clock()  # a validation before the first step says nothing about steps
            return None
        if self.total is None:
            return None
        return (self.clock() - self.began) / done * (self.total - step)

    def log_generations(self, rows: Rows, step: int) -> None:
        for row in rows:
            fields = [f"  {key}: {_indented(str(row[key]))}" for key in OF_A_SAMPLE if key in row]
            self._write("\n".join([f"step:{step} - sample", *fields]))

    def close(self) -> None:
        if self.live is not None:
            self.live.close()
        self.stream.flush()

    def _write(self, text: str) -> None:
        if self.live is not None:
            self.live.print(text)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()


def line(metrics: Metrics, step: int) -> str:
    """A step as one line, numbers only, in verl's format.

    >>> line({"actor/lr": 1e-06, "critic/score/mean": 0.25, "perf/total_num_tokens": 120000, "note": "x"}, 3)
    'step:3 - actor/lr:1e-06 - critic/score/mean:0.25 - perf/total_num_tokens:120000'
    """
    parts = [f"step:{step}"]
    for key, value in metrics.items():
        if not isinstance(value, str):
            parts.append(f"{key}:{number(value)}")
    return " - ".join(parts)


def short_line(metrics: Metrics, step: int, total: int | None, seconds_left: float | None) -> str:
    """A step as one short line: the most important metrics, its seconds, and the time left.

    >>> values = {"critic/score/mean": 0.25, "response_length/mean": 61.5, "timing_s/step": 2}
    >>> short_line(values, 3, 20, 75.2)
    'step:3/20 - reward:0.25 - length:61.5 - 2 s - ETA 0:01:15'
    """
    parts = [f"step:{step}" if total is None else f"step:{step}/{total}"]
    values = shown(metrics)
    validated = [label for label in values if label not in SHOWN]
    for label in (*IN_A_LINE, *validated):
        if label in values:
            parts.append(f"{label.removeprefix('response ')}:{values[label]:.4g}")
    seconds = metrics.get(SECONDS)
    if isinstance(seconds, int | float):
        parts.append(f"{seconds:.3g} s")
    if seconds_left is not None:
        parts.append(f"ETA {timedelta(seconds=round(seconds_left))}")
    return " - ".join(parts)


def number(value: float) -> str:
    """Six significant digits; whole numbers in full.

    >>> number(1234567.0), number(0.123456789), number(3)
    ('1234567.0', '0.123457', '3')
    """
    if isinstance(value, int):
        return str(int(value))
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return f"{value:.6g}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
