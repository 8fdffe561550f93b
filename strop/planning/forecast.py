"""Memory of every phase of a step on one rank, by role and by what it is used for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.planning.activations import Tokens
from strop.planning.devices import CONTEXT, FRAGMENTATION, SAFE, SLACK, SLEEPING_ENGINE, WORKSPACE
from strop.planning.job import REWARD_ROWS, Pass, PlannedJob
from strop.planning.rollout import PlannedSampler
from strop.planning.training import Parts

TEMPORARY = ("activations", "gathered", "step")
"""Parts that are allocated and freed within a phase; the allocator reserves a little more than they need."""
OUTSIDE = ("context", "graphs", "slack")
"""Parts that torch's allocator does not count as allocated."""
CACHE_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Phase:
    """A part of a step, with the memory at its peak."""

    name: str
    roles: dict[str, Parts]
    """Bytes at the peak, by role and by what they are used for."""
    role: str | None = None
    """The role that computes."""
    key: str | None = None
    """The setting that sizes it."""

    @property
    def allocated(self) -> int:
        """Bytes that torch's allocator counts as allocated at the peak."""
        return _allocated(self.roles)

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return sum(taken(part, size) for _, part, size in _each_part(self.roles))

    @property
    def largest_parts(self) -> list[tuple[int, str]]:
        """Bytes and names of all parts, the largest first."""
        parts = [(size, f"{role} {part}") for role, part, size in _each_part(self.roles)]
        return sorted(parts, reverse=True)


def _each_part(roles: dict[str, Parts]) -> Iterator[tuple[str, str, int]]:
    """Role, part and bytes."""
    for role, parts in roles.items():
        for part, size in parts.items():
            yield role, part, size


def _allocated(roles: dict[str, Parts]) -> int:
    return sum(size for _, part, size in _each_part(roles) if part not in OUTSIDE)


def _bytes(roles: dict[str, Parts]) -> int:
    return sum(size for _, _, size in _each_part(roles))


def taken(part: str, size: int) -> int:
    """Bytes that torch reserves for a part of `size` bytes."""
    if part in TEMPORARY:
        return int(size * FRAGMENTATION)
    return size


@dataclass(frozen=True)
class Forecast:
    """The memory of a run, phase by phase."""

    job: PlannedJob
    phases: list[Phase]
    cache: int = 0
    """Bytes of the engine's KV cache."""
    rows: int = 0
    """Sequences that one engine samples at a time."""
    host: int = 0
    """Bytes of host memory per machine: offloaded state, and the copy of a checkpoint that is being
    written."""

    @property
    def memory(self) -> int:
        return self.job.cluster.device.memory

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def starved(self) -> bool:
        """The engine has no room for a single sequence."""
        return self.job.sampler is not None and self.rows < 1


def forecast(job: PlannedJob) -> Forecast:
    """The phases of one step, in order."""
    process: dict[str, Parts] = {"process": _process(job)}
    at_rest = dict(process)
    for role, model in job.models.items():
        at_rest[role] = dict(model.at_rest)
    phases = [_loading(job, process)]
    if job.sampler is None:
        phases += _learning(job, at_rest)
        return Forecast(job, phases, host=_host(job))
    resident = at_rest
    if job.apart:
        resident = process
    sampling, cache, rows = _sampling(job, job.sampler, resident)
    phases.append(sampling)
    phases += _learning_with_engine(job, job.sampler, at_rest, sampling, cache)
    return Forecast(job, phases, cache, rows, _host(job))


def _learning_with_engine(
    job: PlannedJob, sampler: PlannedSampler, at_rest: dict[str, Parts], sampling: Phase, cache: int
) -> list[Phase]:
    """The phases after the rollout, with what the engine keeps on the device."""
    if job.side_by_side and not job.apart:
        return _learning(job, {**at_rest, "engine": sampling.roles["engine"]})
    asleep = _asleep(job, sampler, cache, at_rest)
    phases = _learning(job, {**at_rest, "engine": asleep})
    limit = job.cluster.device.memory * SAFE
    too_large = any(phase.total > limit for phase in phases)
    if job.engine == "native" and job.frees_cache and too_large:
        # The native engine frees its cache as soon as a phase lacks memory.
        phases = _learning(job, {**at_rest, "engine": {**asleep, "cache": 0, "graphs": 0}})
    return phases


def _learning(job: PlannedJob, resident: dict[str, Parts]) -> list[Phase]:
    """All phases after the rollout; `resident` is what stays on the device in all of them."""
    phases = []
    if "reward" in job.models and job.sampler is not None:
        phases.append(_scoring(job, job.sampler, resident))
    for one in job.passes:
        phases.append(_pass_phase(job, one, resident))
    if job.sampler is not None:
        phases.append(_weight_sync(job, resident))
    return [*phases, Phase("save", resident)]


def _process(job: PlannedJob) -> Parts:
    if job.cluster.device.is_cpu:
        return {}
    return {"context": CONTEXT, "workspace": WORKSPACE}


def _loading(job: PlannedJob, process: dict[str, Parts]) -> Phase:
    """Models are loaded one after the other: the peak is one of them, with all that were loaded before."""
    loaded = dict(process)
    peak = dict(process)
    for role, model in job.models.items():
        weights = {"weights": model.weights}
        during = {**loaded, role: {**weights, "step": model.loading}}
        loaded[role] = weights
        for moment in (during, loaded):
            if _bytes(moment) > _bytes(peak):
                peak = dict(moment)
    return Phase("load", peak)


def _sampling(job: PlannedJob, sampler: PlannedSampler, resident: dict[str, Parts]) -> tuple[Phase, int, int]:
    """The rollout, the bytes of its KV cache, and the sequences that are sampled at a time."""
    memory = job.cluster.device.memory
    if job.engine == "native":
        used = _bytes(resident) + sampler.weights
        step = max(sampler.decoding, sampler.prefilling)
        graphs = sampler.recorded
        # If the cache leaves too little memory for a step, the engine takes a smaller cache.
        left = int(memory * SAFE - used - step * FRAGMENTATION - graphs)
        left -= sampler.bookkeeping(max(0, left))
        cache = max(0, min(sampler.cache(memory, used), left))
        engine = {
            "weights": sampler.weights,
            "cache": cache + sampler.bookkeeping(cache),
            "step": step,
            "graphs": graphs,
        }
    else:
        cache = max(0, int(memory * sampler.share) - sampler.module - sampler.decoding)
        weights = sampler.module
        if not job.apart:
            weights += _source_of_weights(job, sampler)
        engine = {"weights": weights, "cache": cache, "step": sampler.decoding}
    rows = sampler.rows(cache)
    if not rows:
        rows = int(cache >= sampler.capacity * sampler.per_token)
    return Phase("rollout", {**resident, "engine": engine}, "engine", CACHE_KEY), cache, rows


def _source_of_weights(job: PlannedJob, sampler: PlannedSampler) -> int:
    """Bytes of the whole module that each of many ranks holds, from which an external engine gets weights."""
    if job.cluster.ranks == 1:
        return 0
    return sampler.numbers.compute * sampler.shape.parameters


def _asleep(job: PlannedJob, sampler: PlannedSampler, cache: int, at_rest: dict[str, Parts]) -> Parts:
    """What the engine keeps on the device while the models learn."""
    if job.apart:  # replicas get each weight as it is exported
        return {}
    memory = job.cluster.device.memory
    if job.engine == "native":
        used = _allocated(at_rest) + sampler.weights
        kept = sampler.kept(cache, memory, used, frees=job.frees_cache)
        graphs = 0
        weights = sampler.weights
        if kept:
            graphs = sampler.recorded
        else:
            weights -= sampler.copies  # freed with the cache
        return {"weights": weights, "cache": kept + sampler.bookkeeping(kept), "graphs": graphs}
    held = int(memory * sampler.share)
    if job.frees_cache:
        held = SLEEPING_ENGINE
    return {"weights": _source_of_weights(job, sampler), "cache": held}


def _scoring(job: PlannedJob, sampler: PlannedSampler, resident: dict[str, Parts]) -> Phase:
    model = job.models["reward"]
    tokens = REWARD_ROWS * (sampler.prompt + sampler.response)
    parts = model.forward(Tokens(tokens, REWARD_ROWS))
    return Phase("reward", {**resident, "reward": {**model.present(), **parts}}, "reward")


def _pass_phase(job: PlannedJob, one: Pass, resident: dict[str, Parts]) -> Phase:
    model = job.models[one.role]
    parts = model.present(learns=one.learns)
    if one.learns:
        parts |= model.update(one.tokens, accumulated=one.accumulated, entropy=one.entropy)
    else:
        parts |= model.forward(one.tokens, entropy=one.entropy, tempered=job.tempered)
    if not job.cluster.device.is_cpu:
        parts["slack"] = SLACK
    return Phase(one.phase, {**resident, one.role: parts}, one.role, one.key)


def _weight_sync(job: PlannedJob, resident: dict[str, Parts]) -> Phase:
    actor = job.models["actor"]
    return Phase("sync", {**resident, "actor": {**actor.present(), "gathered": actor.syncing}}, "actor")


def _offloaded_activations(job: PlannedJob, one: Pass) -> int:
    model = job.models[one.role]
    if not one.learns or not model.offloads_activations:
        return 0
    return model.kept(one.tokens)


def _host(job: PlannedJob) -> int:
    """Bytes of host memory per machine. One device loads weights in float32 through host memory, and a model
    with 4-bit weights in the precision of its file."""
    models = job.models.values()
    per_node = job.cluster.per_node
    offloaded = sum(model.in_host for model in models) * per_node
    offloaded += max((_offloaded_activations(job, one) for one in job.passes), default=0) * per_node
    saving = sum(model.checkpoint for model in models) * per_node // job.cluster.ranks
    loading = 0
    if job.cluster.ranks == 1:
        loading = max((4 - 2 * model.four_bit) * model.shape.parameters for model in models)
    return offloaded + max(saving, loading)
