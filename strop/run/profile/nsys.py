"""Restarts a run under `nsys profile` (Nsight Systems) where `global_profiler.tool=nsys` asks for it.

nsys follows the processes that it starts: one file holds all ranks of a machine. On a Ray cluster it starts
none of them; there each profiled rank restarts itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.run.profile.capture import ProfiledConfig, is_profiled

log = logging.getLogger(__name__)

NSYS_VARIABLE = "STROP_UNDER_NSYS"
"""Environment variable that is set in a process that nsys has started."""


def options(given: Mapping[str, object], captures: int) -> list[str]:
    """nsys options as arguments; without a capture-range-end, nsys stops after the last capture.

    >>> options({"trace": "cuda", "capture-range-end": None, "kill": None}, 2)
    ['--trace=cuda', '--capture-range-end=repeat-shutdown:2']
    """
    arguments = []
    for key, value in given.items():
        if key == "capture-range-end" and value is None:
            value = f"repeat-shutdown:{captures}"
        if value is not None:
            arguments.append(f"--{key}={value}")
    return arguments


def nsys_command(command: Sequence[str], config: ProfiledConfig, rank: int | None = None) -> list[str] | None:
    """The command under nsys; None where it is not asked for, not installed (which is logged), or already
    running under nsys. `rank` is given by a process that restarts itself."""
    settings = config.global_profiler
    if settings.tool != "nsys" or not settings.steps or NSYS_VARIABLE in os.environ:
        return None
    if rank is not None and not is_profiled(config, rank):
        return None
    program = shutil.which("nsys")
    if program is None:
        log.warning(
            "global_profiler.tool=nsys, but `nsys` is not on the PATH of %s: nothing is captured. Install "
            "Nsight Systems, or set global_profiler.tool=torch.",
            socket.gethostname(),
        )
        return None
    nsys = settings.global_tool_config.nsys
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    # A process that trains is a worker. One that only starts ranks is a controller: its ranks inherit nsys.
    given = dict(nsys.worker_nsight_options)
    if devices > 1 and rank is None:
        given = {**nsys.controller_nsight_options, **given}
    folder = Path(settings.save_path)
    folder.mkdir(parents=True, exist_ok=True)
    per_step = 6 if nsys.discrete else 1
    chosen = options(given, per_step * len(settings.steps))
    return [
        program,
        "profile",
        *chosen,
        "--force-overwrite=true",
        f"--output={folder / 'run_%h_%p'}",
        *command,
    ]


def restart_under_nsys(command: Sequence[str], config: ProfiledConfig, rank: int | None = None) -> None:
    """Replace this process by the same command under nsys, where the configuration asks for it."""
    again = nsys_command(command, config, rank)
    if again is not None:
        log.info("Starting again under nsys: %s", " ".join(again[: again.index(command[0])]))
        os.environ[NSYS_VARIABLE] = "1"
        os.execv(again[0], again)
