"""How much memory a run holds: of the host, of this process, of its GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 2**30


def memory_metrics() -> dict[str, float]:
    """What can be known here, in GiB. Peaks of the GPU are since the last call."""
    return {**_host(), **_device()}


def _host() -> dict[str, float]:
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    except (OSError, ValueError, IndexError):  # no Linux
        return {}
    used = known["MemTotal"] - known["MemAvailable"]
    return {"perf/cpu_memory_used_gb": used / GIB, "perf/process_memory_gb": resident / GIB}


def _device() -> dict[str, float]:
    # Asking an unused CUDA would start it.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    peaks = {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / GIB,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks
