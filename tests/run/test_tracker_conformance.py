"""Every registered tracker starts, logs, takes samples, closes and resumes; a new tracker is tested without being listed."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from strop.catalog import TRACKERS
from strop.run.trackers.base import TrackedRun, Trackers, start

METRICS = {"critic/score/mean": 0.5, "tokens": 12, "note": "text", "val-core/x/acc/mean@1": 1.0}
ROWS = [
    {"input": "2+2=", "output": "4", "score": 1.0},
    {"input": "1+1=", "output": "a\nb", "score": 0.0, "pred": None},
]
CONFIG = {"trainer": {"seed": 7, "wandb_proxy": None}, "limit": math.inf}
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}


@pytest.fixture(params=TRACKERS.names())
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each registered tracker, offline, with its files below the test's folder."""
    tracker = str(request.param)
    library = TRACKERS.entry(tracker).facts["library"]
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    for variable in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "SWANLAB_API_KEY", "TENSORBOARD_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tracker


def log_steps(trackers: Trackers, steps: range) -> None:
    with trackers:
        for step in steps:
            trackers.log(METRICS, step)
        trackers.log({"bad": math.nan}, steps[-1])
        trackers.log_generations(ROWS, steps[-1])
        assert trackers.active, "the tracker raised and was dropped"


def test_a_tracker_logs_closes_and_resumes(name: str, tmp_path: Path) -> None:
    log_steps(start(name, TrackedRun(tmp_path, config=CONFIG, total_steps=5)), range(1, 4))
    log_steps(start(name, TrackedRun(tmp_path, config=CONFIG, resumed_from=2)), range(3, 6))


def test_samples_of_mixed_types_drop_no_tracker(name: str, tmp_path: Path) -> None:
    """Two data sources may have numbers and texts as answers, two scorers `acc` as bool and as number."""
    rows: list[dict[str, object]] = [
        {"input": "1", "gts": "4", "acc": True},
        {"input": "2", "gts": 4, "acc": 0.0},
        {"input": "3", "gts": ["4", {"unit": None}], "acc": "no number"},
    ]
    with start(name, TrackedRun(tmp_path, config=CONFIG)) as trackers:
        trackers.log_generations(rows, 1)
        trackers.log(METRICS, 2)
        assert trackers.active, "the tracker raised and was dropped"


def test_half_of_a_surrogate_pair_drops_no_tracker(name: str, tmp_path: Path) -> None:
    """A scorer that parses JSON of the model may report one."""
    half = json.loads('"a\\ud83d"')
    with start(name, TrackedRun(tmp_path, config=CONFIG)) as trackers:
        trackers.log_generations([{"input": half, "pred": [half, {half: 1}]}], 1)
        trackers.log({**METRICS, "note": half}, 2)
        assert trackers.active, "the tracker raised and was dropped"


def test_a_tracker_has_the_methods_of_the_protocol(name: str) -> None:
    kind = TRACKERS.get(name)
    for method in ("log", "log_generations", "close"):
        assert callable(getattr(kind, method))
