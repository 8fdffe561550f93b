"""Does the run fit into the memory of this machine's devices? The planner's answer as findings of the preflight."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import Any

from strop.config.engine import engine_name
from strop.config.rules import Finding, error, warning
from strop.planning.advice import Advice, advise, complaint
from strop.planning.devices import DEVICES, OTHER, Cluster, Device
from strop.planning.knobs import Change, changed

ACCURACY = 0.15
"""How far a forecast may be off: a run that lacks less than this is warned of and not refused."""
GIB = 2**30
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def examine_memory(config: Any, report: Any) -> None:
    """Add what the planner says about the devices of this machine."""
    device = None if config.trainer.memory_check == "off" else local_device(config.trainer)
    if device is None:
        return
    if hasattr(config, "actor_rollout_ref"):
        rollout = config.actor_rollout_ref.rollout
        config = changed(
            config, Change("actor_rollout_ref.rollout.name", rollout.name, engine_name(rollout), "what is installed")
        )
    cluster = Cluster(device, config.trainer.nnodes, config.trainer.n_gpus_per_node)
    try:
        advice = advise(config, cluster)
    except ValueError as problem:  # a model that the planner does not know is no reason not to run it
        report.data["memory"] = f"not planned: {problem}"
        return
    peak = advice.forecast.peak
    report.data["memory"] = f"about {peak.total / GIB:.1f} of {device.memory / GIB:.1f} GiB per device, in {peak.name}"
    report.findings += findings(advice, refuse=config.trainer.memory_check == "refuse")


def findings(advice: Advice, *, refuse: bool = True) -> list[Finding]:
    """A refusal where no micro-batch is small enough and the lack is beyond doubt; else a warning."""
    if advice.fits:
        return []
    found = advice.forecast
    sizes = {one.key for one in found.job.passes}
    by_size = bool(advice.changes) and all(change.key in sizes for change in advice.changes)
    doubtful = found.peak.total <= found.memory * (1 + ACCURACY)
    key = advice.changes[0].key if advice.changes else "trainer.n_gpus_per_node"
    text = f"{complaint(advice)} `strop plan` shows every phase."
    if found.job.cluster.device.is_cpu or by_size or doubtful or not refuse:
        return [warning(key, text)]
    return [error(key, f"{text} trainer.memory_check=warn starts it all the same.")]


def local_device(trainer: Any) -> Device | None:
    """What the ranks of this machine run on; None where that cannot be found out."""
    if trainer.device in ("auto", "cuda"):
        gpu = _gpu()
        if gpu is not None or trainer.device == "cuda":
            return gpu
    if trainer.device not in ("auto", "cpu"):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, trainer.n_gpus_per_node)
    return dataclasses.replace(DEVICES["cpu"], memory=memory)


def _gpu() -> Device | None:
    """The first GPU, asked of the driver's own program: asking torch would take memory on it."""
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
        name, memory = said.splitlines()[0].rsplit(",", 1)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    like = next((known for key, known in DEVICES.items() if key.split("-")[0] in name.lower()), DEVICES[OTHER])
    return dataclasses.replace(like, name=name.strip().lower(), memory=int(memory) * 2**20)
