"""The caller's functions that follow a run, called from its loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from strop.api.progress import ProgressView, can_show, open_view

StepMetrics: TypeAlias = Mapping[str, float | str]
OnStep: TypeAlias = Callable[[int, StepMetrics], object]
"""Called with a step and its metrics, after the step (and after a validation before the first one)."""
OnSamples: TypeAlias = Callable[[int, Sequence[Mapping[str, object]]], object]
"""Called with a step and its samples: rows with input, output, score and `split` (train or validation)."""
Stop: TypeAlias = Callable[[int, StepMetrics], object]
"""Called like OnStep. If it returns a true value, the run saves its state and ends."""


class CallerObserver:
    """Calls the caller's functions and updates the view. An error of a function ends the run, in order and
    with a checkpoint, and is raised when it has ended."""

    def __init__(
        self,
        on_step: OnStep | None = None,
        on_samples: OnSamples | None = None,
        stop: Stop | None = None,
        progress: bool = True,
        title: str = "strop",
    ) -> None:
        self.on_step = on_step
        self.samples_function = on_samples
        self.stop = stop
        self.title = title
        self.quiet = not progress
        self.shows = progress and can_show()
        self.replaces_console = self.shows or not progress
        self.wants_samples = on_samples is not None
        self.view: ProgressView | None = None
        self.rows: list[dict[str, object]] = []
        """Metrics of the steps of this process."""
        self.error: Exception | None = None
        self.asked_to_stop = False
        self.first_step = 0
        self.total_steps = 0

    def begin(self, step: int, total_steps: int) -> None:
        self.first_step = step
        self.total_steps = total_steps
        if step and not self.quiet:
            sys.stderr.write(self._resumed() + "\n")
        if self.shows:
            self.view = open_view(self.title, step, total_steps)

    def _resumed(self) -> str:
        if self.first_step >= self.total_steps:
            return (
                f"strop: all {self.total_steps} steps of this run are done already. Give another folder= for "
                "a new run, or more steps=."
            )
        return f"strop: resuming from step {self.first_step} of {self.total_steps}."

    def log(self, metrics: StepMetrics, step: int) -> None:
        self.rows.append({"step": step, **metrics})
        if self.view is not None:
            self.view.update(metrics, step)
        if self.on_step is not None:
            self._call(self.on_step, step, metrics)
        if self.stop is not None and self._call(self.stop, step, metrics):
            self.asked_to_stop = True

    def on_samples(self, split: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if self.samples_function is not None:
            self._call(self.samples_function, step, [{**row, "split": split} for row in rows])

    def log_generations(self, rows: Sequence[Mapping[str, object]], step: int) -> None:
        """The samples come by `on_samples`."""

    def close(self) -> None:
        if self.view is not None:
            self.view.close()
            self.view = None

    @property
    def stop_requested(self) -> bool:
        return self.asked_to_stop or self.error is not None

    def _call(self, function: Callable[..., object], *arguments: object) -> object:
        if self.error is not None:
            return None
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - user code: it is raised when the run has ended
            self.error = error
            return None
