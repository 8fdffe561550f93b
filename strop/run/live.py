"""The live view of a run on a terminal: progress, time left, and the handful of numbers one looks at first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# Label -> metrics that may fill it, the first that is there wins.
SHOWN: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "loss": ("train/loss",),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "entropy": ("actor/entropy",),
    "response length": ("response_length/mean",),
    "tokens/s": ("perf/throughput",),
}
VALIDATION = ("val-core/", "val/")
_BARS = "▁▂▃▄▅▆▇█"


class LiveView:
    def __init__(self, console: Console, *, title: str, total: int | None, start: int = 0):
        """`start` is the step a resumed run comes from: only what this process does counts for the time left."""
        self.console = console
        self.title = title
        self.history: dict[str, deque[float]] = {}
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            # A step takes minutes, so the speed of the last half minute, rich's default, would often be of no step at all.
            TimeRemainingColumn(),
            console=console,
            expand=True,
            speed_estimate_period=3600,
        )
        self.task = self.progress.add_task("step", total=total, completed=start)
        self.live = Live(self._picture(), console=console, refresh_per_second=2, transient=False)
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
        self.live.update(self._picture())

    def print(self, text: str) -> None:
        """A line above the view."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.live.update(self._picture(), refresh=True)
        self.live.stop()

    def _picture(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for label, values in self.history.items():
            table.add_row(label, f"{values[-1]:.4g}", sparkline(values))
        return Panel(Group(self.progress, table), title=self.title)


def shown(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """The numbers to show, by label: those of SHOWN, then what validation says.

    >>> shown({"actor/ppo_kl": 0.01, "actor/kl_loss": 0.2, "actor/lr": 1e-6, "val-core/gsm8k/acc/mean@1": 0.5})
    {'KL': 0.2, 'gsm8k/acc/mean@1': 0.5}
    """
    found = {}
    for label, keys in SHOWN.items():
        value = next((metrics[key] for key in keys if key in metrics), None)
        if isinstance(value, int | float):
            found[label] = float(value)
    for key, value in metrics.items():
        prefix = next((prefix for prefix in VALIDATION if key.startswith(prefix)), None)
        if prefix and isinstance(value, int | float):
            found[key.removeprefix(prefix)] = float(value)
    return found


def sparkline(values: Sequence[float]) -> str:
    """A curve of one character per value; values that are not finite are gaps.

    >>> sparkline([0, 1, 2, 7, float("nan")])
    '▁▂▃█ '
    """
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return " " * len(values)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(_BARS[round((v - low) / span * 7)] if abs(v) < float("inf") else " " for v in values)
