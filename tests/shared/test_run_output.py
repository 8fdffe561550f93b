"""The end of a run: what trackers get to know about it."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from strop.run.trackers.base import Trackers
from strop.shared.run_output import RunOutput


class Ended:
    """A tracker that remembers how the run ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, metrics: object, step: int) -> None: ...

    def log_generations(self, rows: object, step: int) -> None: ...

    def mark_failed(self, reason: str) -> None:
        self.calls.append(reason)

    def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.parametrize(
    ("error", "calls"),
    [(None, ["closed"]), (RuntimeError("out of memory"), ["RuntimeError: out of memory", "closed"])],
)
def test_trackers_get_the_error_that_ended_the_run(error: Exception | None, calls: list[str]) -> None:
    tracker = Ended()
    checkpoints = SimpleNamespace(close=lambda: None)
    trackers = Trackers({"ended": tracker})
    output = SimpleNamespace(checkpoints=checkpoints, samples=None, trackers=trackers, _open=ExitStack())
    RunOutput.__exit__(output, type(error), error, None)
    assert tracker.calls == calls
