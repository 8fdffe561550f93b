"""Metrics in memory, and curves with as many points as a screen has."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from strop.board.curves import BLOCK, LONG_FILE, MetricFile, MetricStore, downsample, glance
from tests.board.scene import BASE, line


@pytest.mark.parametrize("count", [1, 50, 299, 300, 301, 10_000, 99_991])
def test_no_spike_is_lost_and_no_more_points_come_than_were_asked_for(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 2], values[count // 3] = 50.0, -50.0
    kept = downsample(values, 300)
    assert len(kept) <= 302 and (np.diff(kept) > 0).all()
    assert kept[0] == 0 and kept[-1] == count - 1
    assert values[kept].max() == values.max() and values[kept].min() == values.min()


def test_a_value_that_is_no_number_stays_visible_as_a_gap() -> None:
    values = np.ones(5000)
    values[[7, 2500]] = [np.nan, np.inf]
    assert (~np.isfinite(values[downsample(values, 90)])).sum() == 2


def read(path: Path) -> MetricFile:
    file = MetricFile(path)
    file.refresh()
    return file


def test_curves_have_the_steps_and_times_of_their_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(0, val=0.1)
        + line(1, loss=3)
        + line(2, loss="NaN", val=0.2, note="text")
        + line(3, loss="Infinity", on=True)
    )
    file = read(path)
    assert file.curve("val", 10) == {"step": [0, 2], "time": [BASE, BASE + 20], "value": [0.1, 0.2]}
    assert file.curve("loss", 10) == {
        "step": [1, 2, 3],
        "time": [BASE + 10, BASE + 20, BASE + 30],
        "value": [3.0, None, None],
    }
    assert file.curve("note", 10) is None and file.latest("val") == 0.2
    json.dumps(file.curve("loss", 10), allow_nan=False)


def test_blocks_of_lines_give_what_single_lines_give(tmp_path: Path) -> None:
    """Metrics that come and go, numbers of every kind, and more lines than a block has."""
    rng, path = np.random.default_rng(0), tmp_path / "metrics.jsonl"
    odd = [1, True, None, "NaN", "text", [1], -2.5, 10**400, -(10**400), 1e300]
    lines = []
    for step in range(3 * BLOCK + 17):
        data = {"every": step / 3, "whole": step} | ({"seldom": float(step)} if step % 7 == 0 else {})
        lines.append(line(step, **data, **({"odd": odd[rng.integers(len(odd))]} if step % 300 > 200 else {})))
    path.write_text("".join(lines))
    at_once, bit_by_bit = read(path), MetricFile(tmp_path / "growing")
    for text in lines:
        with bit_by_bit.tail.path.open("a") as file:
            file.write(text)
        bit_by_bit.refresh()
    assert at_once.columns == bit_by_bit.columns or str(at_once.columns) == str(bit_by_bit.columns)
    assert at_once.size == bit_by_bit.size == sum(len(column.values) for column in at_once.columns.values())
    assert (
        list(at_once.columns["seldom"].rows)
        == list(range(0, len(lines), 7))
        == list(at_once.columns["seldom"].values)
    )
    assert {float("inf"), float("-inf"), 1.0, -2.5, 1e300} < set(at_once.columns["odd"].values)


def test_lines_of_another_shape_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    huge = json.dumps({"step": 10**30, "time": 10**400, "data": {"a": 2}})
    path.write_text(
        f'{{"step": "one", "data": {{}}}}\n{{"step": 1}}\n{huge}\n{{"step": 1, "time": null, "data": {{"a": 1}}}}\n'
    )
    file = read(path)
    assert file.tail.damaged == 3 and file.curve("a", 5) == {"step": [1], "time": [None], "value": [1.0]}


def test_stacked_curves_share_their_steps_and_lose_no_second(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [line(step, gen=2.0, **({"testing": 30.0} if step % 7 == 0 else {})) for step in range(1, 1001)]
    path.write_text("".join(lines))
    found = read(path).shares(["gen", "testing", "missing"], 90)
    assert set(found) == {"gen", "testing"} and found["gen"]["step"] == found["testing"]["step"]
    steps = np.diff([0, *found["gen"]["step"]])
    assert (np.array(found["gen"]["value"]) * steps).sum() == pytest.approx(2000)
    assert (np.array(found["testing"]["value"]) * steps).sum() == pytest.approx(30 * 142)
    assert read(tmp_path / "nothing.jsonl").shares(["gen"], 90) == {}


def test_a_run_that_grows_and_one_that_was_resumed(tmp_path: Path) -> None:
    path, store = tmp_path / "metrics.jsonl", MetricStore()
    path.write_text(line(1, a=1) + line(2, a=2) + line(3, a=3))
    ask = lambda: store.ask(path, lambda file: file.curve("a", 10)["value"])  # noqa: E731
    assert ask() == [1, 2, 3]
    with path.open("a") as file:
        file.write(line(4, a=4))
    assert ask() == [1, 2, 3, 4]
    aside = tmp_path / "aside"
    aside.write_text(line(1, a=1) + line(2, a=2.5))
    aside.replace(path)
    assert ask() == [1, 2.5]


def test_runs_that_nobody_asks_about_are_forgotten(tmp_path: Path) -> None:
    store = MetricStore(max_values=250)
    for run in "abc":
        (tmp_path / run).write_text("".join(line(step, x=step) for step in range(100)))
        store.ask(tmp_path / run, lambda file: None)
    assert [path.name for path in store._files] == ["b", "c"]
    assert store.ask(tmp_path / "a", lambda file: file.latest("x")) == 99


def test_a_list_of_more_runs_than_fit_into_memory_reads_each_once(tmp_path: Path) -> None:
    store, asked = MetricStore(max_values=150), []

    def steps(file: MetricFile) -> int:
        asked.append(file.tail.path.name)
        return len(file.steps)

    for run in "abc":
        (tmp_path / run).write_text("".join(line(step, x=step) for step in range(100)))
    for _ in range(3):
        assert [store.cached(tmp_path / run, steps) for run in "abc"] == [100, 100, 100]
    assert asked == ["a", "b", "c"] and len(store._files) == 1
    with (tmp_path / "a").open("a") as file:
        file.write(line(100, x=1))
    assert store.cached(tmp_path / "a", steps) == 101 and store.cached(tmp_path / "none", steps) == 0


def test_nobody_waits_for_a_long_file_of_which_a_list_needs_the_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = tmp_path / "metrics.jsonl", MetricStore()
    lines = [line(step, score=step, **({"rare": 7} if step == 5 else {})) for step in range(20_000)]
    path.write_text("".join(lines) + '{"half')
    reading, go_on = threading.Event(), threading.Event()
    refresh = MetricFile.refresh

    def slow(file: MetricFile) -> None:
        reading.set()
        go_on.wait(60)
        refresh(file)

    monkeypatch.setattr(MetricFile, "refresh", slow)

    def told(file: MetricFile) -> tuple[object, ...]:
        return file.steps[0], file.steps[-1], file.latest("score"), file.tail.offset, file.latest("rare")

    size = path.stat().st_size
    assert size > LONG_FILE
    for _ in range(3):
        assert store.cached(path, told) == (0, 19_999, 19_999, size, None)
    assert reading.wait(60)
    go_on.set()
    until = time.monotonic() + 60
    while store.cached(path, told)[-1] is None and time.monotonic() < until:
        time.sleep(0.01)
    assert store.cached(path, told) == (0, 19_999, 19_999, size, 7)
    with path.open("a") as file:
        file.write('": 1}\n' + line(20_000, score=1))
    assert store.cached(path, told)[1:3] == (20_000, 1)


def test_a_glance_reads_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, x=step) for step in range(5)) + "nonsense\n" + line(5, x=5))
    assert list(glance(path).steps) == [0, 1, 2, 3, 4, 5]
    path.write_text(line(0, x=0))
    assert list(glance(path).steps) == [0]
    path.write_text("")
    assert list(glance(path).steps) == []
