"""The end of a run: what trackers get to know about it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.run.checkpoint import store
from strop.run.checkpoint.layout import SaveError, saved_checkpoints
from strop.run.trackers.base import Trackers
from strop.shared.run_output import RunOutput
from tests.ppo.runs import run


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


def test_a_disk_that_is_full_for_a_while_costs_no_run(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = store.commit
    failed: list[int] = []

    def full_at_step_2(plan: store.PendingCheckpoint) -> Path:
        if plan.step == 2:
            failed.append(plan.step)
            raise SaveError("No space left on device")
        return commit(plan)

    monkeypatch.setattr(store, "commit", full_at_step_2)
    run(overrides)
    assert failed == [2]
    steps = [found.step for found in saved_checkpoints(tmp_path / "run")]
    assert steps == [3, 4], "the next step, then the next one that is due"
