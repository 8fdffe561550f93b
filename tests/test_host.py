"""Cores and memory that a process may use: those of the machine, or what its container allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop import host
from strop.host import host_memory, limited_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("memory.max", "8589934592\n", 8 * GIB),
        ("memory.max", "max\n", 64 * GIB),
        ("memory.max", str(128 * GIB), 64 * GIB),
        ("memory/memory.limit_in_bytes", "8589934592\n", 8 * GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 64 * GIB),
    ],
)
def test_a_container_may_have_less_than_the_machine(
    tmp_path: Path, file: str, text: str, expected: int
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert limited_memory(64 * GIB, tmp_path) == expected


def test_a_machine_without_control_groups_has_all_of_its_memory(tmp_path: Path) -> None:
    assert limited_memory(64 * GIB, tmp_path / "none") == 64 * GIB
    assert host_memory() > 0


def test_ranks_share_the_cores_that_the_container_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host.cores_per_rank() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host.cores_per_rank() == 4
    (tmp_path / "cpu.max").write_text("850000 100000\n")
    assert host.cores_per_rank() == 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host.cores_per_rank() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.cores_per_rank() == 4
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in (("-1\n", 4), ("800000\n", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert host.cores_per_rank() == expected
