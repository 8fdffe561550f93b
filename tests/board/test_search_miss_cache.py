"""Files in which nothing was found are not opened again, and no file that has something is passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strop.board import sample_pages as samples_module
from strop.board.run_index import RunFolder
from strop.board.sample_pages import Query, SampleFolder, SearchKey, SearchMissCache
from tests.board.scene import answer, write_step

HERE = SearchKey(Path("run"), "train", search="carry the")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = []
    open_samples = samples_module.open_samples

    def record(path: Path):
        names.append(path.name)
        return open_samples(path)

    monkeypatch.setattr(samples_module, "open_samples", record)
    return names


def steps_with(samples: SampleFolder, text: str, **query: str) -> list[int]:
    return [group["step"] for group in samples.scan("train", Query(search=text, **query))["groups"]]


def test_what_follows_from_what() -> None:
    assert replace(HERE, search="Carry the ONE").is_narrower(HERE)
    assert replace(HERE, show="failed").is_narrower(HERE)
    assert HERE.is_narrower(replace(HERE, search=""))
    assert not HERE.is_narrower(replace(HERE, search="carry the one"))
    assert not HERE.is_narrower(replace(HERE, show="failed"))
    assert not replace(HERE, show="mixed").is_narrower(replace(HERE, show="failed"))
    assert not replace(HERE, split="validation").is_narrower(HERE)
    assert not replace(HERE, folder=Path("other")).is_narrower(HERE)
    assert not replace(HERE, row=(3, "sums")).is_narrower(HERE)
    assert replace(HERE, search="STRASSE").is_narrower(replace(HERE, search="strasse"))
    assert not replace(HERE, search="straße!").is_narrower(replace(HERE, search="STRAßE"))


def test_files_without_it_are_opened_once(tmp_path: Path, opened: list[str]) -> None:
    for step in range(1, 6):
        write_step(
            tmp_path,
            "train",
            step,
            [answer("a needle" if step == 2 else "only hay", group=0, score=float(step))],
        )
    samples = SampleFolder(RunFolder("id", "run", tmp_path))
    assert steps_with(samples, "need") == [2] and len(opened) == 5
    opened.clear()
    for text in ("need", "Needle", "a needle"):
        assert steps_with(samples, text) == [2]
    assert (
        steps_with(samples, "need", sort="best") == [2] and steps_with(samples, "needle", show="failed") == []
    )
    assert set(opened) == {"train_000002.parquet"}
    assert steps_with(samples, "hay") == [5, 4, 3, 1]


def test_a_file_that_was_replaced_is_looked_at_again(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, "train", step, [answer("only hay")])
    samples = SampleFolder(RunFolder("id", "run", tmp_path))
    assert steps_with(samples, "needle") == []
    write_step(tmp_path, "train", 2, [answer("a needle")])
    write_step(tmp_path, "train", 3, [answer("needles")])
    assert steps_with(samples, "needle") == [3, 2]


def test_the_history_of_a_prompt_remembers_where_it_was_not_kept(tmp_path: Path, opened: list[str]) -> None:
    for step in range(1, 6):
        write_step(tmp_path, "train", step, [answer("x", index=step % 2, score=float(step))])
    samples = SampleFolder(RunFolder("id", "run", tmp_path))
    for left in (5, 2):
        opened.clear()
        assert [entry["step"] for entry in samples.history("train", 0, "sums")["steps"]] == [2, 4]
        assert len(opened) == left


def test_a_damaged_file_is_named_every_time(tmp_path: Path) -> None:
    write_step(tmp_path, "train", 1, [answer("x")]).write_bytes(b"no parquet")
    samples = SampleFolder(RunFolder("id", "run", tmp_path))
    assert [len(samples.scan("train", Query(search="x"))["damaged"]) for _ in range(2)] == [1, 1]


def test_searches_that_nobody_repeats_are_forgotten() -> None:
    misses = SearchMissCache(limit=10)
    for text in ("one", "two", "three"):
        without = misses.lookup(replace(HERE, search=text))
        for step in range(6):
            without.add(step, 1)
    assert not misses.lookup(replace(HERE, search="one")).has(0, 1)
    assert misses.lookup(replace(HERE, search="three")).has(0, 1) and not misses.lookup(
        replace(HERE, search="three")
    ).has(0, 2)
