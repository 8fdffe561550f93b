"""The settings that change memory, as changes of a configuration by key."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from strop.planning.assumptions import SAFE
from strop.planning.devices import Cluster
from strop.planning.forecast import Forecast, Phase, forecast
from strop.planning.job import Pass, job_of
from strop.planning.shape import Shape

ROUND = 256
"""Token budgets are multiples of it."""


@dataclass(frozen=True)
class Change:
    key: str
    was: Any
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key}={_written(self.value)}"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def changed(config: Any, *changes: Change) -> Any:
    """The configuration with these settings; sections that change are copied, the others are shared."""
    for change in changes:
        config = _with(config, change.key.split("."), change.value)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    assert hasattr(section, name), name
    other = copy.copy(section)
    setattr(other, name, _with(getattr(section, name), rest, value) if rest else value)
    return other


def fits(found: Forecast) -> bool:
    return not found.starved and all(phase.total <= found.memory * SAFE for phase in found.phases)


def lack(found: Forecast) -> tuple[int, int]:
    """How far from fitting: bytes that the phases lack together, then an engine without room for a sequence."""
    return sum(max(0, phase.total - int(found.memory * SAFE)) for phase in found.phases), int(found.starved)


def worst(found: Forecast) -> Phase:
    """The phase to begin with: the one that lacks most, or the rollout where only the engine is starved."""
    if only_starved(found):
        return next(phase for phase in found.phases if phase.name == "rollout")
    return found.peak


def only_starved(found: Forecast) -> bool:
    """All phases fit, but nothing is left for the engine's cache."""
    return found.starved and found.peak.total <= found.memory * SAFE


def candidates(config: Any, cluster: Cluster, found: Forecast) -> Iterator[Change]:
    """Changes that may help the worst phase, those that cost least first."""
    phase = worst(found)
    yield from smaller_micro_batch(config, cluster, found, phase)
    if found.job.sampler is not None:
        yield from _engine(config, cluster, found, phase)
    yield from _checkpointing(config, found, phase)
    yield from _slicing(config, cluster, found, phase)
    yield from _sharding(config, cluster, found)


def smaller_micro_batch(config: Any, cluster: Cluster, found: Forecast, phase: Phase) -> Iterator[Change]:
    """The largest micro-batch with which this phase fits, or the smallest there is."""
    one = next((one for one in found.job.passes if one.phase == phase.name), None)
    if one is None:
        return
    sizes = list(reversed(micro_sizes(one, one.size - 1)))
    chosen = None
    for size in sizes:
        chosen = Change(one.key, one.size, size, f"{phase.name} takes less at a time; the result stays the same")
        trial = forecast(job_of(changed(config, chosen), cluster))
        if next(p for p in trial.phases if p.name == phase.name).total <= found.memory * SAFE:
            break
    if chosen is not None:
        yield chosen


def micro_sizes(one: Pass, most: int) -> list[int]:
    """Sizes of a micro-batch worth trying, ascending: powers of two of rows, or multiples of the longest sequence's tokens."""
    if not one.by_tokens:
        return [2**power for power in range(0, max(0, most).bit_length()) if 2**power <= most]
    least = -(-one.longest // ROUND) * ROUND
    sizes = {least * 2**power for power in range(12)} | {least * 3 * 2**power // 2 // ROUND * ROUND for power in range(1, 12)}
    return sorted(size for size in sizes if least <= size <= most)


def _engine(config: Any, cluster: Cluster, found: Forecast, phase: Phase) -> Iterator[Change]:
    rollout, path = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    sampler = found.job.sampler
    assert sampler is not None
    if not rollout.free_cache_engine and phase.name != "rollout":
        yield Change(f"{path}.free_cache_engine", False, True, "the cache is given back while the models learn")
    if phase.name == "rollout":
        key, now = f"{path}.gpu_memory_utilization", rollout.gpu_memory_utilization
        others = [step / 20 for step in range(4, 19)]
        if found.starved:
            for share in (share for share in others if share > now):
                yield Change(key, now, share, "the engine may take more memory for its cache")
        elif found.job.engine != "native":
            for share in sorted((share for share in others if share < now), reverse=True):
                yield Change(key, now, share, "the engine takes less memory")
    size = rollout.tensor_model_parallel_size * 2
    if can_share(sampler.shape, size, cluster):
        yield Change(
            f"{path}.tensor_model_parallel_size", size // 2, size, f"{size} devices share one copy of the engine's weights"
        )


def can_share(shape: Shape, size: int, cluster: Cluster) -> bool:
    """Whether `size` neighbouring devices can divide the matrices of a model; mixtures of experts are not divided so."""
    divides = shape.key_heads % size == 0 and shape.heads % size == 0 and shape.width % size == 0
    return shape.experts is None and divides and cluster.per_node % size == 0


def _checkpointing(config: Any, found: Forecast, phase: Phase) -> Iterator[Change]:
    path = found.job.model_paths.get(phase.role or "")
    if path is None or not any(one.learns and one.phase == phase.name for one in found.job.passes):
        return
    key = f"{path}.enable_gradient_checkpointing"
    if not read(config, key):
        yield Change(key, False, True, "activations are computed again in the backward pass")


def _slicing(config: Any, cluster: Cluster, found: Forecast, phase: Phase) -> Iterator[Change]:
    """Where one sequence is too long for a device, twice as many devices share it."""
    key = found.job.slicing.get(phase.role or "")
    if key is None:
        return
    model = found.job.models[phase.role or ""]
    size = 2 * read(config, key)
    if model.shape.heads % size == 0 and model.placement.tensor == 1 and cluster.per_node % size == 0:
        yield Change(key, size // 2, size, f"{size} devices share each sequence")


def _sharding(config: Any, cluster: Cluster, found: Forecast) -> Iterator[Change]:
    """One copy of the weights over all ranks; then weights in host memory, of what is not trained first."""
    order = [role for role in ("reference", "critic", "actor", "model") if role in found.job.models and role in found.job.paths]
    for role in order:
        key = f"{found.job.paths[role]}.fsdp_config.fsdp_size"
        if cluster.ranks > 1 and read(config, key) not in (-1, cluster.ranks):
            yield Change(key, read(config, key), -1, "all ranks share one copy of the weights")
    for role in order:
        key = f"{found.job.paths[role]}.fsdp_config.offload_policy"
        if not read(config, key):
            yield Change(key, False, True, f"the {role}'s weights and optimizer rest in host memory")
