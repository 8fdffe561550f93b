"""Steps by the names of files: a folder is listed again when it changed, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.board import run_index as listing
from strop.board.run_index import StepListingCache


def settled(folder: Path, seconds_ago: int) -> None:
    """A folder that last changed so long ago."""
    then = folder.stat().st_ctime - seconds_ago
    os.utime(folder, (then, then))


def test_a_folder_that_changed_is_listed_again_and_another_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []

    def counted(folder: Path) -> listing.Steps:
        listed.append(folder)
        return list_steps(folder)

    list_steps = listing.list_steps
    monkeypatch.setattr(listing, "list_steps", counted)
    listings = StepListingCache()
    for step in (3, 1, 1_000_000):
        (tmp_path / f"train_{step:06d}.parquet").touch()
    (tmp_path / ".train_000002.parquet.new").touch()
    settled(tmp_path, 100)
    for _ in range(5):
        steps = listings.steps(tmp_path)
        assert steps["train"].tolist() == [1, 3, 1_000_000] and steps["validation"].tolist() == []
    assert len(listed) == 1
    (tmp_path / "validation_000003.parquet").touch()
    assert listings.steps(tmp_path)["validation"].tolist() == [3]


def test_what_changes_while_it_is_listed_is_not_lost(tmp_path: Path) -> None:
    """The clock of a file system stands still for milliseconds; two changes may have the same time."""
    listings = StepListingCache()
    (tmp_path / "train_000001.parquet").touch()
    now = tmp_path.stat().st_mtime_ns
    assert listings.steps(tmp_path)["train"].tolist() == [1]
    (tmp_path / "train_000002.parquet").touch()
    os.utime(tmp_path, ns=(now, now))
    assert listings.steps(tmp_path)["train"].tolist() == [1, 2]


def test_no_more_is_kept_than_allowed(tmp_path: Path) -> None:
    listings = StepListingCache(limit=5)
    for run in "abc":
        (tmp_path / run).mkdir()
        for step in range(2):
            (tmp_path / run / f"train_{step:06d}.parquet").touch()
        settled(tmp_path / run, 100)
        assert len(listings.steps(tmp_path / run)["train"]) == 2
    assert [folder.name for folder in listings._known] == ["b", "c"]
    assert listings.steps(tmp_path / "nothing")["train"].tolist() == []
