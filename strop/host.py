"""The cores and the memory of this machine that a process may use. A scheduler or a container may give it a
part of them."""

from __future__ import annotations

import contextlib
import math
import os
from functools import cache
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


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
    """Return the cores that the control group of a container allows, infinity if there is no limit. `groups`:
    where control groups are mounted, version 2 or 1."""
    quota, period = "max", ""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text().split()
    with contextlib.suppress(OSError):
        quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
        period = (groups / "cpu" / "cpu.cfs_period_us").read_text().strip()
    if quota in ("max", "-1"):
        return math.inf
    return int(quota) / int(period)


@cache
def host_memory() -> int:
    """Return the bytes of memory that this process may use."""
    return limited_memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), GROUPS)


def limited_memory(physical: int, groups: Path) -> int:
    """Return the memory of the machine, or less where its control group has a limit. `groups`: where control
    groups are mounted, version 2 or 1; without a limit the one says max, the other a huge number."""
    for file in (groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            physical = min(physical, int(file.read_text()))
    return physical
