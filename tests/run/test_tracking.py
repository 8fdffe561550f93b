"""The fan-out: starting, failing, closing; and what is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.catalog import TRACKERS
from strop.registry import Registry
from strop.run.trackers import base as tracking
from strop.run.trackers.base import TrackedRun, Trackers, start
from strop.stopping import StopRequested


class Memory:
    """A tracker that remembers, or breaks when told."""

    def __init__(self, run: TrackedRun | None = None, *, breaks: bool = False):
        self.run = run
        self.breaks = breaks
        self.seen: list[Any] = []
        self.closed = False

    def log(self, metrics: Any, step: int) -> None:
        if self.breaks:
            raise ConnectionError("server gone")
        self.seen.append((step, dict(metrics)))

    def log_generations(self, rows: Any, step: int) -> None:
        self.seen.append((step, list(rows)))

    def close(self) -> None:
        self.closed = True


def test_all_get_everything() -> None:
    one, two = Memory(), Memory()
    with Trackers({"one": one, "two": two}) as trackers:
        trackers.log({"a": 1.5}, 1)
        trackers.log_generations([{"input": "x"}], 1)
    assert one.seen == two.seen == [(1, {"a": 1.5}), (1, [{"input": "x"}])]
    assert one.closed and two.closed


class Ending(Memory):
    """A tracker whose service shows how a run ended."""

    def mark_failed(self, reason: str) -> None:
        assert not self.closed
        self.seen.append(reason)


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (None, []),
        (ValueError("no rows"), ["ValueError: no rows"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt: "]),
        (StopRequested(15), []),  # a signal ended the run in order, and it can go on
    ],
)
def test_a_run_that_failed_is_marked_before_trackers_close(
    error: BaseException | None, reasons: list[str]
) -> None:
    plain, ending = Memory(), Ending()
    trackers = Trackers({"plain": plain, "ending": ending})
    trackers.__exit__(type(error) if error else None, error, None)
    assert ending.seen == reasons and ending.closed and plain.closed


def test_one_whose_service_is_away_is_closed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Away(Ending):
        def mark_failed(self, reason: str) -> None:
            raise ConnectionError("no route")

    away = Away()
    Trackers({"away": away}).close(ValueError("no rows"))
    assert away.closed and "no route" in caplog.text


def test_one_that_fails_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Memory(), Memory(breaks=True)
    trackers = Trackers({"bad": bad, "good": good})
    for step in range(3):
        trackers.log({"a": step}, step)
    assert [step for step, _ in good.seen] == [0, 1, 2]
    assert caplog.text.count("The tracker 'bad' failed") == 1 and "server gone" in caplog.text


def test_values_become_plain_and_others_are_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    trackers = Trackers({"m": memory})
    for step in (1, 2):
        trackers.log(
            {"t": torch.tensor(2.5), "i": torch.tensor(3), "s": "text", "list": [1], "v": torch.ones(2)}, step
        )
    assert memory.seen[0] == (1, {"t": 2.5, "i": 3, "s": "text"}) and type(memory.seen[0][1]["t"]) is float
    assert (
        caplog.text.count("The metric 'list' is a list") == 1
        and caplog.text.count("The metric 'v' is a Tensor") == 1
    )


def test_an_unknown_name_offers_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown tracker 'tensorbord'\. Did you mean 'tensorboard'"):
        start(["console", "tensorbord"], TrackedRun(tmp_path))


def test_one_that_cannot_start_stops_the_run_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, made = Registry("tracker"), Memory()

    def offline(run: TrackedRun) -> Any:
        raise ConnectionError("no network")

    registry.declare("good", lambda run: made)
    registry.declare("bad", offline)
    monkeypatch.setattr(tracking, "TRACKERS", registry)
    with pytest.raises(
        ValueError, match=r"'bad' of trainer\.logger could not start: ConnectionError: no network"
    ):
        start(["good", "bad"], TrackedRun(tmp_path))
    assert made.closed


def test_a_place_that_cannot_be_written_is_known_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"'file' of trainer\.logger could not start: NotADirectoryError"):
        start("file", TrackedRun(tmp_path / "file" / "run"))


def test_two_names_of_one_tracker_log_once(tmp_path: Path) -> None:
    with start(["file", "jsonl", "file"], TrackedRun(tmp_path)) as trackers:
        trackers.log({"a": 1}, 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_every_tracker_gets_the_config(tmp_path: Path) -> None:
    config = {"actor": {"lr": 1e-6}, "limit": float("inf")}
    with start(["file"], TrackedRun(tmp_path, config=config)):
        pass
    written = json.loads((tmp_path / "metrics.config.json").read_text(), parse_constant=pytest.fail)
    assert written == {"actor": {"lr": 1e-6}, "limit": "Infinity"}


def test_the_built_in_names_all_load() -> None:
    assert {"console", "file", "jsonl", "csv", "tensorboard"} <= set(TRACKERS.names())
    assert all(callable(TRACKERS.get(name)) for name in TRACKERS.names())
