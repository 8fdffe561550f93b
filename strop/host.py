"""The cores, the memory and the cache folder of this machine that a process may use. A scheduler or a
container may give it a part of the cores and the memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cache_root() -> Path:
    """Return the folder for copies of remote files and for compiled functions: $STROP_CACHE, or
    ~/.cache/strop."""
    return Path(os.environ.get("STROP_CACHE") or "~/.cache/strop").expanduser()


def cores_per_rank() -> int:
    """Return the cores that this process may use, divided among the ranks of this machine, at least 1.

    So many programs of the sandbox run at the same time: their limits are wall-clock time, and with fewer
    cores than programs, programs that are right would time out.
    """
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def usable_cores() -> int:
    """Return the cores that this process may use."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return int(min(cores, cpu_quota(GROUPS)))


def cpu_quota(groups: Path) -> float:
    """Return the cores that the control groups of this process allow, infinity if there is no limit.
    `groups`: where control groups are mounted, version 2 or 1."""
    cores = math.inf
    for folder in control_folders(groups, "cpu"):
        quota, period = "max", ""
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
        with contextlib.suppress(OSError):
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota not in ("max", "-1"):
            cores = min(cores, int(quota) / int(period))
    return cores


def control_folders(groups: Path, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits hold for this process: its control group and all above it.

    In a container the mount is its own control group, and the path that the kernel names may not exist below
    it. A job of SLURM or systemd is in a group below the mount, and the limit may be at any level.
    """
    yield groups
    yield groups / controller
    membership = ""
    with contextlib.suppress(OSError):
        membership = os.fsdecode(MEMBERSHIP.read_bytes())
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        base = groups if not controllers else groups / controller
        names = path.strip("/").split("/")
        if ".." in names or (controllers and controller not in controllers.split(",")):
            continue
        for depth in range(1, len(names) + 1):
            yield base.joinpath(*names[:depth])


@cache
def host_memory() -> int:
    """Return the bytes of memory that this process may use."""
    return limited_memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), GROUPS)


def limited_memory(physical: int, groups: Path) -> int:
    """Return the memory of the machine, or less where a control group of this process has a limit. `groups`:
    where control groups are mounted, version 2 or 1; without a limit the one says max, the other a huge
    number."""
    for folder in control_folders(groups, "memory"):
        for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                physical = min(physical, int(file.read_text()))
    return physical
