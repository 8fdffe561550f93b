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


@pytest.mark.parametrize(
    ("membership", "level", "seen"),
    [
        ("0::/system.slice/job_7/step_0/user/task_0\n", "system.slice/job_7", True),
        ("0::/system.slice/job_7/step_0\n", "system.slice/job_7/step_0", True),
        ("0::/system.slice/job_8\n", "system.slice/job_7", False),
        ("0::/../job_7\n", "job_7", False),
        (
            "9:name=systemd:/a\n4:memory:/slurm/job_7/step_0\n2:cpu,cpuacct:/slurm/job_7\n",
            "slurm/job_7",
            True,
        ),
        ("9:name=systemd:/slurm/job_7\n4:memory:/\n0::/\n", "slurm/job_7", False),
    ],
)
def test_a_job_of_a_scheduler_may_have_less_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, level: str, seen: bool
) -> None:
    """Its control group is below the mount, and the limit is at any level above the process."""
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)
    first = ":memory:" in membership
    memory = tmp_path / ("memory" if first else "") / level
    cpu = tmp_path / ("cpu" if first else "") / level
    memory.mkdir(parents=True)
    cpu.mkdir(parents=True, exist_ok=True)
    if first:
        (memory / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
        (cpu / "cpu.cfs_quota_us").write_text("300000\n")
        (cpu / "cpu.cfs_period_us").write_text("100000\n")
    else:
        (memory / "memory.max").write_text(f"{8 * GIB}\n")
        (cpu / "cpu.max").write_text("300000 100000\n")
    assert limited_memory(64 * GIB, tmp_path) == (8 * GIB if seen else 64 * GIB)
    assert host.cpu_quota(tmp_path) == (3.0 if seen else float("inf"))


def test_a_control_group_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files are bytes, not text in UTF-8."""
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_bytes(b"0::/user:j\xf6b\n")
    group = Path(os.fsdecode(bytes(tmp_path) + b"/groups/user:j\xf6b"))
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{GIB}\n")
    assert limited_memory(64 * GIB, tmp_path / "groups") == GIB
