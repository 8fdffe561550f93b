"""A job over rows that goes on after a kill, on this machine and at an address."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from strop.inference.resumable_rows import PartialOutput, publish


@pytest.fixture(params=["local", "file", "memory"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    where = {"local": f"{tmp_path}/", "file": f"file://{tmp_path}/", "memory": f"memory://{tmp_path.name}/"}
    return where[request.param] + "deep/out.parquet"


def listed(output: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(output)
    folder = path.rpartition("/")[0]
    return sorted(name.rpartition("/")[2] for name in system.find(folder))


def test_rows_are_kept_until_the_output_is_there(output: str) -> None:
    job = {"model": "m", "seed": 1}
    parts = PartialOutput(output, job)
    assert not parts.started and parts.open() == {}
    parts.add({0: ["a"], 5: ["b", "c"]})
    parts.add({1: {"error": "too long"}})
    again = PartialOutput(output, dict(job))
    assert again.started and again.open() == {0: ["a"], 5: ["b", "c"], 1: {"error": "too long"}}
    assert not again.output_exists
    again.finish(lambda path: path.write_text("all"))
    assert again.output_exists and listed(output) == ["out.parquet"]
    with fsspec.open(output, "rt") as file:
        assert file.read() == "all"


def test_another_job_does_not_go_on(output: str) -> None:
    PartialOutput(output, {"data.n_samples": 5, "seed": 1}).open()
    with pytest.raises(
        ValueError,
        match=r"holds finished rows of another job: data.n_samples was 5 and is 3\. Choose another",
    ):
        PartialOutput(output, {"data.n_samples": 3, "seed": 1}).open()


def test_a_damaged_part_is_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = PartialOutput(str(tmp_path / "out.parquet"), {})
    parts.open()
    parts.add({0: ["whole"]})
    parts.add({1: ["cut"]})
    cut = sorted((tmp_path / "out.parquet.parts").glob("[0-9]*.json"))[-1]
    cut.write_text(cut.read_text()[:9])
    assert parts.open() == {0: ["whole"]} and "cannot be read" in caplog.text
    assert not cut.exists()


def test_a_row_that_was_done_again_has_its_later_value(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter(["f", "e", "d", "c", "b", "a", "9", "8"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(marks))
    parts = PartialOutput(output, {})
    parts.open()
    parts.add({0: {"error": "the engine ran out of memory"}, 1: ["x"]})
    parts.add({0: ["y"]})
    assert parts.open() == {0: ["y"], 1: ["x"]}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("before")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish(str(target), fail)
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"] and target.read_text() == "before"
    publish(str(target), lambda path: path.write_text(json.dumps(1)))
    assert target.read_text() == "1"
