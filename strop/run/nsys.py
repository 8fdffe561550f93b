"""Nsight Systems around a run: with `global_profiler.tool=nsys` it starts again under `nsys profile`, where that is installed.

nsys follows the processes it started: one file holds all ranks of a machine. On a Ray cluster it starts none of them; there
each rank that is to be profiled starts itself again.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.run.profiled import is_profiled

log = logging.getLogger(__name__)

INSIDE = "STROP_UNDER_NSYS"
"""Set in a process that nsys has started."""


def options(given: Mapping[str, Any], captures: int) -> list[str]:
    """Options as arguments; an end of captures that nobody set is after the last one.

    >>> options({"trace": "cuda,nvtx", "capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}, 2)
    ['--trace=cuda,nvtx', '--capture-range=cudaProfilerApi', '--capture-range-end=repeat-shutdown:2', '--kill=none']
    """
    filled = {key: value for key, value in given.items() if value is not None or key == "capture-range-end"}
    if "capture-range-end" in filled and filled["capture-range-end"] is None:
        filled["capture-range-end"] = f"repeat-shutdown:{captures}"
    return [f"--{key}={value}" for key, value in filled.items()]


def wrapped(command: Sequence[str], config: Any, rank: int | None = None) -> list[str] | None:
    """The command under nsys; None where it is not asked for, not installed (which is told), or already around us. `rank`: of a
    process that no other one starts under nsys."""
    settings = getattr(config, "global_profiler", None)
    if settings is None or settings.tool != "nsys" or not settings.steps or INSIDE in os.environ:
        return None
    if rank is not None and not is_profiled(config, rank):
        return None
    program = shutil.which("nsys")
    if program is None:
        log.warning(
            "global_profiler.tool=nsys, but `nsys` is not on the PATH of %s: nothing is captured. Install Nsight Systems, or "
            "set global_profiler.tool=torch.",
            socket.gethostname(),
        )
        return None
    nsys = settings.global_tool_config.nsys
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    # The process that trains is the worker; one that only starts ranks is a controller, and its ranks take what is open.
    trains = devices == 1 or rank is not None
    given = nsys.worker_nsight_options if trains else {**nsys.controller_nsight_options, **nsys.worker_nsight_options}
    folder = Path(settings.save_path)
    folder.mkdir(parents=True, exist_ok=True)
    per_step = 6 if nsys.discrete else 1
    chosen = options(given, per_step * len(settings.steps))
    return [program, "profile", *chosen, "--force-overwrite=true", f"--output={folder / 'run_%h_%p'}", *command]


def under_nsys(command: Sequence[str], config: Any, rank: int | None = None) -> None:
    """Become the same command under nsys, where that was asked for."""
    again = wrapped(command, config, rank)
    if again is not None:
        log.info("Starting again under nsys: %s", " ".join(again[: again.index(command[0])]))
        os.environ[INSIDE] = "1"
        os.execv(again[0], again)
