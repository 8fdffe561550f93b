"""What to set when a run does not fit, and how large micro-batches may be when it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strop.planning.assumptions import SAFE
from strop.planning.devices import Cluster
from strop.planning.forecast import Forecast, forecast
from strop.planning.job import job_of
from strop.planning.knobs import Change, can_share, candidates, changed, fits, lack, micro_sizes, only_starved, read, worst
from strop.planning.times import seconds

MOST_CHANGES = 16
MOST_NODES = 1024
LARGEST_BUDGET = 1 << 17
"""Tokens of a micro-batch beyond which nothing gets faster."""
GIB = 2**30


@dataclass(frozen=True)
class Advice:
    forecast: Forecast
    fits: bool
    changes: list[Change] = field(default_factory=list)
    """Settings with which it fits, by the same forecast; empty where it fits already, or where nothing helps."""
    room: list[Change] = field(default_factory=list)
    """Larger micro-batches that fit too."""
    cluster: Cluster | None = None
    """The smallest cluster of such devices that is enough, where no setting helps."""
    settings_there: list[Change] = field(default_factory=list)
    """What to set on that cluster."""

    @property
    def hopeless(self) -> bool:
        return not self.fits and not self.changes


def advise(config: Any, cluster: Cluster) -> Advice:
    found = forecast(job_of(config, cluster))
    if fits(found):
        return Advice(found, True, room=larger_micro_batches(config, cluster))
    changes = rescue(config, cluster)
    if changes is not None:
        return Advice(found, False, changes)
    larger, there = enough_devices(config, cluster)
    return Advice(found, False, cluster=larger, settings_there=there)


def rescue(config: Any, cluster: Cluster) -> list[Change] | None:
    """Settings with which the run fits, as few as it takes; None where there are none."""
    taken: dict[str, Change] = {}
    for _ in range(MOST_CHANGES):
        current = changed(config, *taken.values())
        found = forecast(job_of(current, cluster))
        if fits(found):
            return _pruned(config, cluster, list(taken.values()))
        change = _helpful(current, cluster, found)
        if change is None:
            return None
        first = taken.get(change.key, change)
        taken[change.key] = Change(change.key, first.was, change.value, change.why)
    return None


def _helpful(config: Any, cluster: Cluster, found: Forecast) -> Change | None:
    for change in candidates(config, cluster, found):
        if lack(forecast(job_of(changed(config, change), cluster))) < lack(found):
            return change
    return None


def _pruned(config: Any, cluster: Cluster, changes: list[Change]) -> list[Change]:
    """Without those that later ones made unnecessary, and with micro-batches no smaller than the others ask for."""
    for change in list(changes):
        others = [other for other in changes if other is not change]
        if fits(forecast(job_of(changed(config, *others), cluster))):
            changes = others
    job = job_of(config, cluster)
    for one in job.passes:
        mine = next((change for change in changes if change.key == one.key), None)
        if mine is None:
            continue
        others = [change for change in changes if change is not mine]
        for size in reversed(micro_sizes(one, one.size)):
            larger = Change(mine.key, mine.was, size, mine.why)
            if fits(forecast(job_of(changed(config, *others, larger), cluster))):
                changes = [*others, larger]
                break
    return changes


def larger_micro_batches(config: Any, cluster: Cluster) -> list[Change]:
    """The largest micro-batch of every pass that fits, where it is larger than the setting."""
    found = []
    for one in job_of(config, cluster).passes:
        most = LARGEST_BUDGET if one.by_tokens else LARGEST_BUDGET // one.longest
        for size in reversed(micro_sizes(one, min(most, _whole(one)))):
            if size <= one.size:
                break
            change = Change(one.key, one.size, size, f"{one.phase} would take more at a time")
            if fits(forecast(job_of(changed(config, change), cluster))):
                found.append(change)
                break
    return found


def _whole(one: Any) -> int:
    """No micro-batch is larger than what a rank has of a step."""
    rows = max(1, one.total.all // max(1, one.longest))
    return int(one.total.all if one.by_tokens else rows)


def enough_devices(config: Any, cluster: Cluster) -> tuple[Cluster | None, list[Change]]:
    """Twice as many devices, and twice as many again, until it fits with the right settings."""
    per_node, nodes = cluster.per_node, cluster.nodes
    while nodes <= MOST_NODES:
        per_node, nodes = (per_node * 2, nodes) if per_node < 8 else (per_node, nodes * 2)
        larger = Cluster(cluster.device, nodes, per_node)
        changes = rescue(config, larger)
        if changes is not None:
            return larger, changes
    return None, []


def alternatives(config: Any, cluster: Cluster) -> list[tuple[Change, Forecast]]:
    """What each knob does, turned once: the change, and the forecast with it."""
    job = job_of(config, cluster)
    keys: dict[str, Any] = {}
    for path in job.model_paths.values():
        key = f"{path}.enable_gradient_checkpointing"
        keys[key] = not read(config, key)
    for one in job.passes:
        if one.learns:
            keys[one.key] = max(1, one.size // 2) if not one.by_tokens else max(one.longest, one.size // 2)
    for role in (role for role in job.models if role in job.paths):
        key = f"{job.paths[role]}.fsdp_config.offload_policy"
        keys[key] = not read(config, key)
    if job.sampler is not None:
        rollout = "actor_rollout_ref.rollout"
        now = read(config, f"{rollout}.gpu_memory_utilization")
        keys[f"{rollout}.gpu_memory_utilization"] = round(min(0.9, now + 0.1), 2)
        keys[f"{rollout}.max_num_seqs"] = max(1, job.sampler.max_rows // 2)
        size = job.sampler.tensor * 2
        if can_share(job.sampler.shape, size, cluster):
            keys[f"{rollout}.tensor_model_parallel_size"] = size
    turned = [Change(key, read(config, key), value, "") for key, value in keys.items() if read(config, key) != value]
    return [(change, forecast(job_of(changed(config, change), cluster))) for change in turned]


def complaint(advice: Advice) -> str:
    """One paragraph for a run that does not fit: which phase, what fills it, what to set."""
    found = advice.forecast
    phase, memory = worst(found), found.memory / GIB
    if only_starved(found):
        sampler = found.job.sampler
        assert sampler is not None
        need = sampler.capacity * sampler.per_token / GIB
        text = (
            f"The engine has {found.cache / GIB:.2f} GiB for its cache, and one sequence of {sampler.capacity} tokens needs "
            f"{need:.2f} GiB."
        )
    else:
        parts = sorted(
            ((size, f"{role} {part}") for role, parts in phase.roles.items() for part, size in parts.items()), reverse=True
        )
        largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts[:3])
        has = f"the device has {memory:.1f}"
        if phase.total <= found.memory:
            has = f"of the device's {memory:.1f} a plan leaves {1 - SAFE:.0%} free"
        text = f"{phase.name} needs {phase.total / GIB:.1f} GiB, and {has} ({largest} GiB)."
    if advice.changes:
        return f"{text} Set {' '.join(map(str, advice.changes))}."
    if advice.cluster is not None:
        more, settings = advice.cluster, " ".join(map(str, advice.settings_there))
        return f"{text} No setting helps on this many devices; {more.nodes} x {more.per_node} of them would do" + (
            f", with {settings}." if settings else "."
        )
    return f"{text} No setting and no number of such devices helps: {_last_resort(found)}."


def _last_resort(found: Forecast) -> str:
    """What may help where no knob does."""
    engine = found.peak.roles.get("engine", {}).get("weights", 0)
    if engine < found.memory / 2:
        return "use shorter sequences, a smaller model, or model.lora_rank"
    if found.job.engine != "native":
        return f"beside {found.job.engine} every rank keeps a whole copy of the weights; rollout.name=native divides it"
    return "every rank's engine has a whole copy of the weights, and mixtures of experts are not divided; take larger devices"


def step_seconds(found: Forecast) -> float:
    return sum(seconds(found).values())
