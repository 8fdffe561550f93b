"""Does the run fit into the memory of this machine's devices? Findings from the forecast of the planner."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import TYPE_CHECKING

from strop.config.derived import engine_name
from strop.config.rules import ConfigFinding, error, warning
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.trainer import TrainerConfig
from strop.planning.advice import Advice, advise, complaint
from strop.planning.devices import DEVICES, OTHER, Device, PlannedCluster
from strop.planning.knobs import SettingChange, changed
from strop.preflight.report import PreflightReport

if TYPE_CHECKING:
    from strop.config.schema.roots import TrainingConfig

ACCURACY = 0.15
"""How far a forecast may be off: a run that lacks less than this is warned of and not refused."""
GIB = 2**30
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def examine_memory(config: TrainingConfig, report: PreflightReport) -> None:
    """Add what the planner says about the devices of this machine."""
    device = None
    if config.trainer.memory_check != "off":
        device = local_device(config.trainer)
    if device is None:
        return
    if isinstance(config, PpoConfig):
        rollout = config.actor_rollout_ref.rollout
        config = changed(
            config,
            SettingChange(
                "actor_rollout_ref.rollout.name", rollout.name, engine_name(rollout), "what is installed"
            ),
        )
    cluster = PlannedCluster(device, config.trainer.nnodes, config.trainer.n_gpus_per_node)
    try:
        advice = advise(config, cluster)
    except ValueError as problem:  # a model that the planner does not know is no reason not to run it
        report.data["memory"] = f"not planned: {problem}"
        return
    peak = advice.forecast.peak
    report.data["memory"] = (
        f"about {peak.total / GIB:.1f} of {device.memory / GIB:.1f} GiB per device, in {peak.name}"
    )
    report.findings += findings(advice, refuse=config.trainer.memory_check == "refuse")


def findings(advice: Advice, *, refuse: bool = True) -> list[ConfigFinding]:
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


def local_device(trainer: TrainerConfig) -> Device | None:
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
    """The first GPU. nvidia-smi is used, because torch would create a CUDA context, which takes memory."""
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
        name, memory = output.splitlines()[0].rsplit(",", 1)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    similar = DEVICES[OTHER]
    for key, known in DEVICES.items():
        if key.split("-")[0] in name.lower():
            similar = known
            break
    return dataclasses.replace(similar, name=name.strip().lower(), memory=int(memory) * 2**20)
