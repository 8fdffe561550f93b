"""Checks of the devices of this machine: whether there is a GPU, what it supports, and whether the run
fits."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import TYPE_CHECKING

from strop.config.derived import engine_name
from strop.config.rules import ConfigFinding, error, warning
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.trainer import TrainerConfig
from strop.host import host_memory
from strop.planning.advice import Advice, advise, complaint
from strop.planning.devices import DEVICES, OTHER, Device, PlannedCluster
from strop.planning.knobs import SettingChange, changed
from strop.preflight.report import PreflightReport

if TYPE_CHECKING:
    from strop.config.schema.rollout import RolloutConfig
    from strop.config.schema.roots import RootConfig, TrainingConfig

ACCURACY = 0.15
"""How far a forecast may be off: a run that lacks less than this is warned of and not refused."""
GIB = 2**30
FP8_CAPABILITY = 8.9
"""Compute capability of GPUs that multiply fp8."""


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
    if device.is_cpu and config.trainer.device == "auto" and not advice.fits:
        report.data["memory"] = f"about {peak.total / GIB:.1f} GiB per process, in {peak.name}; no GPU here"
        report.findings.append(warning("trainer.device", _without_gpu(advice, report.root)))
        return
    report.data["memory"] = (
        f"about {peak.total / GIB:.1f} of {device.memory / GIB:.1f} GiB per device, in {peak.name}"
    )
    report.findings += memory_findings(advice, refuse=config.trainer.memory_check == "refuse")


def _without_gpu(advice: Advice, root: str) -> str:
    """About a run that does not fit into the memory of a machine without a GPU: it is probably meant for
    another one."""
    found = advice.forecast
    processes = found.job.cluster.per_node
    each = f"the CPU has {found.memory / GIB:.1f} GiB for its process"
    if processes > 1:
        each = f"each of the {processes} processes on the CPU would have {found.memory / GIB:.1f} GiB"
    text = (
        f"there is no GPU here, and {each}, too little for {found.peak.name}. Whether the run fits on GPUs "
        f"says `strop plan {root.partition('_')[0]} ... --gpu NAME` with the keys of this command; NAME is "
        f"{', '.join(name for name in DEVICES if name != 'cpu')} or a size such as 80GiB."
    )
    if advice.changes:
        text += f" To run it on this CPU set {' '.join(map(str, advice.changes))}."
    return text


def device_notices(config: RootConfig) -> list[str]:
    """That the GPU which the configuration demands is not here. `strop check` also runs where there is none,
    so it is no error; a run stops when it opens the device."""
    trainer = getattr(config, "trainer", None)
    if getattr(trainer, "device", None) != "cuda" or _query_gpu("name") is not None:
        return []
    return [
        "trainer.device=cuda, but there is no GPU here (nvidia-smi does not answer): a run stops at once. "
        "The memory of GPUs was not checked; see `strop plan`."
    ]


def memory_findings(advice: Advice, *, refuse: bool = True) -> list[ConfigFinding]:
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
    memory = host_memory() // max(1, trainer.n_gpus_per_node)
    return dataclasses.replace(DEVICES["cpu"], memory=memory)


def quantization_findings(key: str, rollout: RolloutConfig, device: str) -> list[ConfigFinding]:
    """An error if the native engine is to sample with fp8 weights, or an fp8 KV cache, on a machine whose
    first GPU has no fp8. A warning if the machine has none: the run may be meant for another one."""
    remedies = {}
    if rollout.quantization == "fp8":
        remedies["quantization"] = f"{key}.quantization=int8 or null"
    if rollout.kv_cache_dtype == "fp8":
        remedies["kv_cache_dtype"] = f"{key}.kv_cache_dtype=auto"
    if not remedies or engine_name(rollout) != "native" or device == "cpu":
        return []
    if rollout.nnodes:  # the engines are on other machines
        return []
    found = _query_gpu("name,compute_cap")
    if found is None and device == "auto":  # on a CPU plain torch reads an fp8 KV cache
        remedies.pop("kv_cache_dtype", None)
    level = error
    if found is None:
        level = warning
        missing = "this machine has none (nvidia-smi does not answer)"
    else:
        name, capability = found.rsplit(",", 1)
        if not capability.strip()[:1].isdigit() or float(capability) >= FP8_CAPABILITY:
            return []
        missing = f"{name.strip()} has {capability.strip()}"
    findings = []
    for name, remedy in remedies.items():
        needed = f"fp8 needs a GPU with compute capability {FP8_CAPABILITY} or more"
        message = f"{needed}, but {missing}. Set {remedy}."
        findings.append(level(f"{key}.{name}", message, about_machine=True))
    return findings


def _query_gpu(fields: str) -> str | None:
    """What nvidia-smi says about the first GPU. It is used because torch would create a CUDA context, which
    takes memory."""
    command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return output.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _gpu() -> Device | None:
    """The first GPU."""
    found = _query_gpu("name,memory.total")
    if found is None or "," not in found:
        return None
    name, memory = found.rsplit(",", 1)
    if not memory.strip().isdigit():  # "[N/A]": a GPU without memory of its own, such as that of a DGX Spark
        return None
    similar = DEVICES[OTHER]
    for key, known in DEVICES.items():
        if key.split("-")[0] in name.lower():
            similar = known
            break
    return dataclasses.replace(similar, name=name.strip().lower(), memory=int(memory) * 2**20)
