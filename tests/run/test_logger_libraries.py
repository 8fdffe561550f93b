"""The trackers over the real libraries, offline: what was logged can be read back, and a resumed run goes on under its id."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strop.extras
from strop.catalog import TRACKERS
from strop.run.trackers.base import TrackedRun, start

pytestmark = pytest.mark.loggers

CONFIG = {"trainer": {"wandb_proxy": None, "seed": 7}, "lr": 1e-6, "limit": float("inf"), "files": ["a", "b"]}
ROWS = [
    {"input": "2+2=", "output": "4", "score": 1.0, "step": 5},
    {"input": "1+1=", "output": "3", "score": 0.0, "pred": "3"},
]


def logged(name: str, folder: Path, resumed_from: int | None, steps: range) -> str:
    """Log some steps; the id that the run was known by."""
    run = TrackedRun(folder, project="sums", experiment="first", config=CONFIG, resumed_from=resumed_from)
    with start(name, run) as trackers:
        for step in steps:
            trackers.log(
                {"critic/score/mean": step / 8, "val-core/x/acc/mean@1": 0.5, "note": "text", "tokens": step},
                step,
            )
        trackers.log_generations(ROWS, steps[-1])
        assert trackers.active, "it failed on the way"
    return str(json.loads((folder / "trackers.json").read_text())[name])


def blocks(path: Path, header: int = 7) -> Iterator[bytes]:
    """Records of a file in blocks of 32 KiB, the way LevelDB writes its log."""
    data, place, part = path.read_bytes(), header, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield part
            part = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    first, second = logged("wandb", tmp_path, None, range(1, 6)), logged("wandb", tmp_path, 3, range(4, 8))
    assert first == second
    wandb.teardown()  # until then, its process may not have written all
    curves: list[dict[int, float]] = []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        assert first in file.name
        curve: dict[int, float] = {}
        for piece in blocks(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(piece)
            if record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.project, record.run.display_name) == (
                    first,
                    "sums",
                    "first",
                )
                config = {
                    item.key: json.loads(item.value_json)
                    for item in record.run.config.update
                    if item.key != "_wandb"
                }
                assert config == {**CONFIG, "limit": "Infinity"}
            elif record.WhichOneof("record_type") == "history":
                values = {item.nested_key[0]: item.value_json for item in record.history.item}
                curve[record.history.step.num] = float(values["critic/score/mean"])
        curves.append(curve)
    assert curves == [{step: step / 8 for step in range(1, 6)}, {step: step / 8 for step in range(4, 8)}]
    tables = sorted(tmp_path.glob("wandb/*/files/media/table/val/*.table.json"))
    assert json.loads(tables[0].read_text())["data"][0][:3] == ["2+2=", "4", 1.0]


def test_mlflow_in_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first, second = logged("mlflow", tmp_path, None, range(1, 6)), logged("mlflow", tmp_path, 3, range(4, 8))
    assert first == second
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(first)
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "sums"
    assert run.data.params["trainer.seed"] == "7" and run.data.params["lr"] == "1e-06"
    curve = {point.step: point.value for point in client.get_metric_history(first, "critic/score/mean")}
    assert (
        curve == {step: step / 8 for step in range(1, 8)}
        and run.data.metrics["val-core/x/acc/mean_at_1"] == 0.5
    )
    artifacts = tmp_path / "mlflow_artifacts" / first / "artifacts"
    assert json.loads((artifacts / "config.json").read_text())["limit"] == "Infinity"
    table = json.loads((artifacts / "val_generations" / "step_7.json").read_text())
    assert table == {"columns": ["input", "output", "score", "step", "pred"],
                     "data": [["2+2=", "4", 1.0, 5, None], ["1+1=", "3", 0.0, None, "3"]]}  # fmt: skip
    assert not (Path.cwd() / "mlruns").exists()


def test_swanlab_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    first, second = (
        logged("swanlab", tmp_path, None, range(1, 6)),
        logged("swanlab", tmp_path, 3, range(4, 8)),
    )
    assert first == second and len(first) == 21
    found = sorted(tmp_path.glob("swanlab/run-*"))
    assert len(found) == 2 and all(first in folder.name for folder in found)
    for folder, steps in zip(found, (range(1, 6), range(4, 8)), strict=True):
        (file,) = folder.glob("*.swanlab")
        records = list(blocks(file))
        points = [
            record
            for record in records
            if b"critic/score/mean" in record and struct.pack("<d", steps[-1] / 8) in record
        ]
        assert points, "the last point was not flushed"
        assert sum(b"critic/score/mean" in record for record in records) >= len(steps)
        assert "seed: 7" in (folder / "files" / "config.yaml").read_text()
        (table,) = folder.glob("media/echarts/*.json")
        assert json.loads(table.read_text())["rowData"][1]["input"] == "1+1="


def test_trackio_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path / "run"
    first, second = logged("trackio", folder, None, range(1, 6)), logged("trackio", folder, 3, range(4, 8))
    assert first == second == "first"
    rows: list[dict[str, Any]] = SQLiteStorage.get_logs("sums", "first")
    curve = {row["step"]: row["critic/score/mean"] for row in rows if "critic/score/mean" in row}
    assert curve == {step: step / 8 for step in range(1, 8)}
    assert rows[-1]["val/generations"]["_value"][0]["input"] == "2+2="
    (run,) = trackio.Api().runs("sums")
    assert run.config["trainer"]["seed"] == 7
    assert (
        logged("trackio", tmp_path / "other", None, range(1, 3)) == "first-2"
    )  # another run under a name that is taken


def crashed(name: str, folder: Path) -> str:
    """A run that ends with an error; its id."""
    run = TrackedRun(folder, project="sums", experiment="crashed", config=CONFIG)
    with pytest.raises(ZeroDivisionError), start(name, run) as trackers:
        trackers.log({"critic/score/mean": 0.5}, 1)
        raise ZeroDivisionError("by nothing")
    return str(json.loads((folder / "trackers.json").read_text())[name])


def test_wandb_gets_the_exit_code_and_keeps_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    crashed("wandb", tmp_path / "run")
    wandb.teardown()  # the process behind wandb writes the last records after `finish`, under load seconds later
    assert not (tmp_path / "run" / "wandb").exists()
    (file,) = (tmp_path / "elsewhere").glob("wandb/offline-run-*/*.wandb")
    codes = []
    for piece in blocks(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(piece)
        if record.WhichOneof("record_type") == "exit":
            codes.append(record.exit.exit_code)
    assert codes == [1]


def test_mlflow_shows_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    identity = crashed("mlflow", tmp_path)
    run = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db").get_run(identity)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "ZeroDivisionError: by nothing"


def test_swanlab_gets_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    crashed("swanlab", tmp_path)
    (file,) = tmp_path.glob("swanlab/run-*/*.swanlab")
    assert any(b"ZeroDivisionError: by nothing" in record for record in blocks(file))


def test_trackio_gets_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    crashed("trackio", tmp_path / "run")
    (alert,) = SQLiteStorage.get_alerts("sums", "crashed")
    assert (alert["level"], alert["text"]) == ("error", "ZeroDivisionError: by nothing")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_missing_library_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Any:
        raise ImportError(f"No module named {module!r}")

    kind = TRACKERS.get(name)
    monkeypatch.setattr(strop.extras.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=re.escape(strop.extras.install_command(name))):
        kind(TrackedRun(tmp_path))
