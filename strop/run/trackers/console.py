"""One line per step, `step:N - key:value - ...`, and on a terminal a live view below."""

from __future__ import annotations

import sys
from typing import TextIO

from strop.run.live import LiveView
from strop.run.tracking import Metrics, Rows, Run


class ConsoleTracker:
    def __init__(self, run: Run, *, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.live = LiveView.on_terminal(
            self.stream, title=f"{run.project} / {run.experiment}", total=run.total_steps, start=run.resumed_from or 0
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._say(line(metrics, step))
        if self.live is not None:
            self.live.update(metrics, step)

    def log_generations(self, rows: Rows, step: int) -> None:
        for row in rows:
            fields = "\n".join(f"  {key}: {_indented(str(value))}" for key, value in row.items())
            self._say(f"step:{step} - sample\n{fields}")

    def close(self) -> None:
        if self.live is not None:
            self.live.close()
        self.stream.flush()

    def _say(self, text: str) -> None:
        if self.live is not None:
            self.live.print(text)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()


def line(metrics: Metrics, step: int) -> str:
    """Numbers only, as people and their scripts expect.

    >>> line({"actor/lr": 1e-06, "critic/score/mean": 0.25, "perf/total_num_tokens": 120000, "note": "text"}, 3)
    'step:3 - actor/lr:1e-06 - critic/score/mean:0.25 - perf/total_num_tokens:120000'
    """
    numbers = {key: value for key, value in metrics.items() if not isinstance(value, str)}
    return " - ".join([f"step:{step}", *(f"{key}:{number(value)}" for key, value in numbers.items())])


def number(value: float) -> str:
    """Six significant digits; whole numbers in full.

    >>> number(1234567.0), number(0.123456789), number(3)
    ('1234567.0', '0.123457', '3')
    """
    if isinstance(value, int):
        return str(int(value))
    return f"{value:.1f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
