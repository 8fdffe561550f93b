"""Files in which nothing was found are not opened again, and no file that has something is passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strop.board import samples as samples_module
from strop.board.find import RunFolder
from strop.board.misses import Misses, Wanted
from strop.board.samples import Query, SampleFolder
from tests.board.scene import answer, write_step

HERE = Wanted(Path("run"), "train", search="carry the")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = []
    opened = samples_module.opened

    def told(path: Path):
        names.append(path.name)
        return opened(path)

    monkeypatch.setattr(samples_module, "opened", told)
    return names


def steps_with(samples: SampleFolder, text: str, **query: str) -> list[int]:
    return [group["step"] for group in samples.scan("train", Query(search=text, **query))["groups"]]


def test_what_follows_from_what() -> None:
    assert replace(HERE, search="Carry the ONE").follows(HERE)
    assert replace(HERE, show="failed").follows(HERE)
    assert HERE.follows(replace(HERE, search=""))
    assert not HERE.follows(replace(HERE, search="carry the one"))
    assert not HERE.follows(replace(HERE, show="failed"))
    assert not replace(HERE, show="mixed").follows(replace(HERE, show="failed"))
    assert not replace(HERE, split="validation").follows(HERE)
    assert not replace(HERE, folder=Path("other")).follows(HERE)
    assert not replace(HERE, row=(3, "sums")).follows(HERE)
    assert replace(HERE, search="STRASSE").follows(replace(HERE, search="strasse"))
    assert not replace(HERE, search="straße!").follows(replace(HERE, search="STRAßE"))


def test_files_without_it_are_opened_once(tmp_path: Path, opened: list[str]) -> None:
    for step in range(1, 6):
        write_step(tmp_path, "train", step, [answer("a needle" if step == 2 else "only hay", group=0, score=float(step))])
    samples = SampleFolder(RunFolder("id", "run", tmp_path))
    assert steps_with(samples, "need") == [2] and len(opened) == 5
    opened.clear()
    for text in ("need", "Needle", "a needle"):
        assert steps_with(samples, text) == [2]
    assert steps_with(samples, "need", sort="best") == [2] and steps_with(samples, "needle", show="failed") == []
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
    misses = Misses(most=10)
    for text in ("one", "two", "three"):
        without = misses.of(replace(HERE, search=text))
        for step in range(6):
            without.add(step, 1)
    assert not misses.of(replace(HERE, search="one")).has(0, 1)
    assert misses.of(replace(HERE, search="three")).has(0, 1) and not misses.of(replace(HERE, search="three")).has(0, 2)
