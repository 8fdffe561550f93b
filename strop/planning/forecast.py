"""Memory of every phase of a run on one rank, role by role, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from strop.planning.assumptions import CONTEXT, FRAGMENTATION, SAFE, SLACK, SLEEPING_ENGINE, WORKSPACE
from strop.planning.job import Job, Pass
from strop.planning.training import Parts

PASSING = ("activations", "gathered", "step")
"""Parts that come and go within a phase; the allocator keeps a little more than they need."""
OUTSIDE = ("context", "graphs", "slack")
"""Parts that torch's allocator does not count as allocated."""


@dataclass(frozen=True)
class Phase:
    name: str
    roles: dict[str, Parts]
    """Bytes at the peak, by role and by what they are for."""
    role: str | None = None
    """Who computes in it."""
    key: str | None = None
    """The setting that sizes it."""

    @property
    def allocated(self) -> int:
        """What torch's allocator hands out at the peak."""
        return sum(size for parts in self.roles.values() for part, size in parts.items() if part not in OUTSIDE)

    @property
    def total(self) -> int:
        """What the device must have."""
        return sum(taken(part, size) for parts in self.roles.values() for part, size in parts.items())


def taken(part: str, size: int) -> int:
    return int(size * FRAGMENTATION) if part in PASSING else size


@dataclass(frozen=True)
class Forecast:
    job: Job
    phases: list[Phase]
    cache: int = 0
    """Bytes of the engine's cache."""
    rows: int = 0
    """Sequences that one engine samples at a time."""
    host: int = 0
    """Bytes of host memory per machine: what rests there, and the copy of a checkpoint on its way to the disk."""

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

    def over(self, phase: Phase) -> int:
        """Bytes that a phase lacks; negative: bytes to spare."""
        return phase.total - self.memory


def forecast(job: Job) -> Forecast:
    """The phases of one step, in order."""
    rest = {role: dict(model.at_rest) for role, model in job.models.items()}
    base: dict[str, Parts] = {"process": _process(job)}
    phases = [_loading(job, base)]
    cache, rows = 0, 0
    beside: dict[str, Parts] = {**base, **rest}
    if job.sampler is not None:
        sampling, cache, rows = _sampling(job, base if job.apart else beside)
        phases.append(sampling)
        awake = job.side_by_side and not job.apart
        stays = sampling.roles["engine"] if awake else _asleep(job, cache, beside)
        learning = _learning(job, {**beside, "engine": stays})
        kept = job.engine == "native" and job.frees_cache and not awake
        if kept and any(phase.total > job.cluster.device.memory * SAFE for phase in learning):
            # As soon as somebody lacks it, the engine gives it back.
            learning = _learning(job, {**beside, "engine": {**stays, "cache": 0, "graphs": 0}})
        phases += learning
    else:
        phases += _learning(job, beside)
    return Forecast(job, phases, cache, rows, _host(job))


def _learning(job: Job, beside: dict[str, Parts]) -> list[Phase]:
    """Everything after the rollout, beside what stays on the device all the time."""
    phases = [_scoring(job, beside)] if "reward" in job.models and job.sampler is not None else []
    phases += [_passing(job, one, beside) for one in job.passes]
    if job.sampler is not None:
        phases.append(_syncing(job, beside))
    return [*phases, Phase("save", beside)]


def _process(job: Job) -> Parts:
    return {} if job.cluster.device.is_cpu else {"context": CONTEXT, "workspace": WORKSPACE}


def _loading(job: Job, base: dict[str, Parts]) -> Phase:
    """Models come one after the other: the largest moment is beside all that came before."""
    here, best = dict(base), dict(base)
    for role, model in job.models.items():
        weights = {"weights": model.weights}
        during = {**here, role: {**weights, "step": model.loading}}
        here[role] = weights
        best = max((best, during, here), key=lambda roles: sum(sum(parts.values()) for parts in roles.values()))
        best = dict(best)
    return Phase("load", best)


def _sampling(job: Job, beside: dict[str, Parts]) -> tuple[Phase, int, int]:
    sampler, memory = job.sampler, job.cluster.device.memory
    assert sampler is not None
    used = sum(sum(parts.values()) for parts in beside.values()) + sampler.weights
    if job.engine == "native":
        step, graphs = max(sampler.decoding, sampler.prefilling), sampler.recorded
        # Where the cache leaves too little for a step, the engine retreats to a smaller one.
        left = int(memory * SAFE - used - step * FRAGMENTATION - graphs)
        left -= sampler.bookkeeping(max(0, left))
        cache = max(0, min(sampler.cache(memory, used), left))
        own = {
            "weights": sampler.weights,
            "cache": cache + sampler.bookkeeping(cache),
            "step": step,
            "graphs": graphs,
        }
    else:
        cache = max(0, int(memory * sampler.share) - sampler.module - sampler.decoding)
        own = {"weights": _copy(job) * (not job.apart) + sampler.module, "cache": cache, "step": sampler.decoding}
    rows = sampler.rows(cache) or (1 if cache >= sampler.capacity * sampler.per_token else 0)
    phase = Phase("rollout", {**beside, "engine": own}, "engine", "actor_rollout_ref.rollout.gpu_memory_utilization")
    return phase, cache, rows


def _copy(job: Job) -> int:
    """The whole module that each of many ranks holds as the source of weights for an engine outside of it."""
    assert job.sampler is not None
    return 0 if job.cluster.ranks == 1 else job.sampler.numbers.compute * job.sampler.shape.parameters


def _asleep(job: Job, cache: int, beside: dict[str, Parts]) -> Parts:
    """What the engine keeps on the device while the models learn."""
    sampler, memory = job.sampler, job.cluster.device.memory
    assert sampler is not None
    if job.apart:
        return {"weights": _copy(job)}
    if job.engine == "native":
        used = sum(size for parts in beside.values() for part, size in parts.items() if part not in OUTSIDE)
        kept = sampler.kept(cache, memory, used + sampler.weights, frees=job.frees_cache)
        graphs = sampler.recorded if kept else 0
        return {"weights": sampler.weights, "cache": kept + sampler.bookkeeping(kept), "graphs": graphs}
    return {"weights": _copy(job), "cache": SLEEPING_ENGINE if job.frees_cache else int(memory * sampler.share)}


def _scoring(job: Job, beside: dict[str, Parts]) -> Phase:
    from strop.planning.activations import Tokens
    from strop.planning.job import REWARD_ROWS

    model, sampler = job.models["reward"], job.sampler
    assert sampler is not None
    tokens = REWARD_ROWS * (sampler.prompt + sampler.response)
    parts = model.forward(Tokens(tokens, REWARD_ROWS))
    return Phase("reward", {**beside, "reward": {**model.present(), **parts}}, "reward")


def _passing(job: Job, one: Pass, beside: dict[str, Parts]) -> Phase:
    model = job.models[one.role]
    if one.learns:
        parts = model.update(one.tokens, accumulated=one.accumulated, entropy=one.entropy)
    else:
        parts = model.forward(one.tokens, entropy=one.entropy, tempered=job.tempered)
    slack = {} if job.cluster.device.is_cpu else {"slack": SLACK}
    return Phase(one.phase, {**beside, one.role: {**model.present(learns=one.learns), **parts, **slack}}, one.role, one.key)


def _syncing(job: Job, beside: dict[str, Parts]) -> Phase:
    actor = job.models["actor"]
    return Phase("sync", {**beside, "actor": {**actor.present(), "gathered": actor.syncing}}, "actor")


def _host(job: Job) -> int:
    """Per machine. One device loads weights in float32 through host memory."""
    per_node = job.cluster.per_node
    resting = sum(model.in_host for model in job.models.values()) * per_node
    saving = sum(model.checkpoint for model in job.models.values()) * per_node // job.cluster.ranks
    loading = max(4 * model.shape.parameters for model in job.models.values()) if job.cluster.ranks == 1 else 0
    return resting + max(saving, loading)
