"""The settings that change memory use, as changes of a configuration by key."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from strop.config.schema.rollout import RolloutConfig
from strop.planning.devices import SAFE, PlannedCluster
from strop.planning.forecast import Forecast, Phase, forecast
from strop.planning.job import ROLLOUT, Pass, TrainingConfig, job_of
from strop.planning.shape import Shape

Section = TypeVar("Section")

TOKEN_STEP = 256
"""Token budgets are multiples of it."""
UTILIZATIONS = [step / 20 for step in range(4, 19)]
"""Values of gpu_memory_utilization worth trying."""


@dataclass(frozen=True)
class SettingChange:
    """A setting, its value before and after, and the reason."""

    key: str
    was: object
    value: object
    why: str

    def __str__(self) -> str:
        return f"{self.key}={as_word(self.value)}"


def as_word(value: object) -> str:
    """A value as it is written on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


# --- reading and changing a configuration -------------------------------------------------------------------


def read(config: object, key: str) -> object:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def changed(config: Section, *changes: SettingChange) -> Section:
    """The configuration with these settings. Sections that change are copied, the other ones are shared."""
    for change in changes:
        config = _with_value(config, change.key.split("."), change.value)
    return config


def _with_value(section: Section, path: list[str], value: object) -> Section:
    name, *rest = path
    assert hasattr(section, name), name
    if rest:
        value = _with_value(getattr(section, name), rest, value)
    other = copy.copy(section)
    setattr(other, name, value)
    return other


# --- whether a forecast fits --------------------------------------------------------------------------------


def fits(found: Forecast) -> bool:
    """Whether every phase fits the device, and the engine has room for a sequence."""
    return not found.starved and all(phase.total <= found.memory * SAFE for phase in found.phases)


def lack(found: Forecast) -> tuple[int, int]:
    """How far a run is from fitting: bytes that all phases lack together, then whether the engine has no room
    for a sequence."""
    limit = int(found.memory * SAFE)
    missing = sum(max(0, phase.total - limit) for phase in found.phases)
    return missing, int(found.starved)


def worst(found: Forecast) -> Phase:
    """The phase to change first: the one that lacks most, or the rollout if only the engine lacks memory."""
    if only_starved(found):
        return next(phase for phase in found.phases if phase.name == "rollout")
    return found.peak


def only_starved(found: Forecast) -> bool:
    """All phases fit, but nothing is left for the KV cache."""
    return found.starved and found.peak.total <= found.memory * SAFE


# --- changes that save memory -------------------------------------------------------------------------------


def candidates(config: TrainingConfig, cluster: PlannedCluster, found: Forecast) -> Iterator[SettingChange]:
    """Changes that may help the worst phase, the cheapest ones first."""
    phase = worst(found)
    yield from smaller_micro_batch(config, cluster, found, phase)
    if found.job.sampler is not None:
        yield from _engine(config, cluster, found, phase)
    yield from _checkpointing(config, found, phase)
    yield from _sequence_parallel(config, cluster, found, phase)
    yield from _activation_offload(config, found, phase)
    yield from _sharding(config, cluster, found)


def smaller_micro_batch(
    config: TrainingConfig, cluster: PlannedCluster, found: Forecast, phase: Phase
) -> Iterator[SettingChange]:
    """The largest micro-batch with which this phase fits, or the smallest possible one."""
    one = next((one for one in found.job.passes if one.phase == phase.name), None)
    if one is None:
        return
    why = f"{phase.name} takes less at a time; the result stays the same"
    chosen = None
    for size in reversed(micro_sizes(one, one.size - 1)):
        chosen = SettingChange(one.key, one.size, size, why)
        trial = forecast(job_of(changed(config, chosen), cluster))
        after = next(p for p in trial.phases if p.name == phase.name)
        if after.total <= found.memory * SAFE:
            break
    if chosen is not None:
        yield chosen


def micro_sizes(one: Pass, limit: int) -> list[int]:
    """Micro-batch sizes up to `limit` that are worth trying, ascending: powers of two of rows, or multiples
    of the tokens of the longest sequence."""
    if not one.by_tokens:
        return [2**power for power in range(0, max(0, limit).bit_length()) if 2**power <= limit]
    minimum = -(-one.longest // TOKEN_STEP) * TOKEN_STEP
    sizes = {minimum}
    for power in range(1, 12):
        sizes.add(minimum * 2**power)
        sizes.add(minimum * 3 * 2**power // 2 // TOKEN_STEP * TOKEN_STEP)
    return sorted(size for size in sizes if minimum <= size <= limit)


def _engine(
    config: TrainingConfig, cluster: PlannedCluster, found: Forecast, phase: Phase
) -> Iterator[SettingChange]:
    rollout = read(config, ROLLOUT)
    sampler = found.job.sampler
    assert isinstance(rollout, RolloutConfig)
    assert sampler is not None
    if not rollout.free_cache_engine and phase.name != "rollout":
        yield SettingChange(
            f"{ROLLOUT}.free_cache_engine", False, True, "the cache is given back while the models learn"
        )
    if phase.name == "rollout":
        yield from _utilization(rollout.gpu_memory_utilization, found)
    size = rollout.tensor_model_parallel_size * 2
    if can_share(sampler.shape, size, cluster):
        yield SettingChange(
            f"{ROLLOUT}.tensor_model_parallel_size",
            size // 2,
            size,
            f"{size} devices share one copy of the engine's weights",
        )


def _utilization(now: float, found: Forecast) -> Iterator[SettingChange]:
    """More memory for an engine without room for a sequence, less for an engine that takes too much."""
    key = f"{ROLLOUT}.gpu_memory_utilization"
    if found.starved:
        for share in UTILIZATIONS:
            if share > now:
                yield SettingChange(key, now, share, "the engine may take more memory for its cache")
    elif found.job.engine != "native":
        for share in reversed(UTILIZATIONS):
            if share < now:
                yield SettingChange(key, now, share, "the engine takes less memory")


def can_share(shape: Shape, size: int, cluster: PlannedCluster) -> bool:
    """Whether tensor parallelism over `size` devices of a node can divide a model. Mixtures of experts cannot
    be divided in this way."""
    divides = shape.key_heads % size == 0 and shape.heads % size == 0 and shape.width % size == 0
    return shape.experts is None and divides and cluster.per_node % size == 0


def _checkpointing(config: TrainingConfig, found: Forecast, phase: Phase) -> Iterator[SettingChange]:
    path = found.job.model_paths.get(phase.role or "")
    if path is None or not any(one.learns and one.phase == phase.name for one in found.job.passes):
        return
    model = found.job.models[phase.role or ""]
    mode = f"{path}.gradient_checkpointing"
    chosen = read(config, mode)
    if chosen not in (None, "full"):
        yield SettingChange(mode, chosen, "full", "activations are computed again in the backward pass")
    elif model.checkpointing == "none":
        key = f"{path}.enable_gradient_checkpointing"
        yield SettingChange(key, False, True, "activations are computed again in the backward pass")


def _activation_offload(config: TrainingConfig, found: Forecast, phase: Phase) -> Iterator[SettingChange]:
    path = found.job.model_paths.get(phase.role or "")
    if path is None or found.job.cluster.device.is_cpu:
        return
    key = f"{path}.enable_activation_offload"
    if any(one.learns and one.phase == phase.name for one in found.job.passes) and not read(config, key):
        yield SettingChange(key, False, True, "what layers keep waits in host memory")


def _sequence_parallel(
    config: TrainingConfig, cluster: PlannedCluster, found: Forecast, phase: Phase
) -> Iterator[SettingChange]:
    """Twice as many devices share each sequence, for sequences that are too long for a device."""
    key = found.job.slicing.get(phase.role or "")
    if key is None:
        return
    model = found.job.models[phase.role or ""]
    now = read(config, key)
    assert isinstance(now, int)
    size = 2 * now
    if model.shape.heads % size == 0 and model.placement.tensor == 1 and cluster.per_node % size == 0:
        yield SettingChange(key, now, size, f"{size} devices share each sequence")


def _sharding(config: TrainingConfig, cluster: PlannedCluster, found: Forecast) -> Iterator[SettingChange]:
    """One copy of the weights over all ranks; then CPU offload, of frozen models first."""
    job = found.job
    order = ("reference", "critic", "actor", "model")
    roles = [role for role in order if role in job.models and role in job.paths]
    for role in roles:
        key = f"{job.paths[role]}.fsdp_config.fsdp_size"
        size = read(config, key)
        if size != -1 and isinstance(size, int) and size < cluster.ranks:
            yield SettingChange(key, size, -1, "all ranks share one copy of the weights")
    for role in roles:
        key = f"{job.paths[role]}.fsdp_config.offload_policy"
        if not read(config, key):
            yield SettingChange(key, False, True, f"the {role}'s weights and optimizer rest in host memory")
