"""What to set when a run does not fit, and how large micro-batches may be when it does."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.config.schema.ppo import PpoConfig
from strop.planning.devices import GIB, SAFE, PlannedCluster
from strop.planning.forecast import Forecast, forecast
from strop.planning.job import ROLLOUT, SHARED_MODULE_ENGINES, Pass, PlannedJob, TrainingConfig, job_of
from strop.planning.knobs import (
    SettingChange,
    can_share,
    candidates,
    changed,
    fits,
    lack,
    micro_sizes,
    only_starved,
    read,
    worst,
)

MAX_CHANGES = 16
MAX_NODES = 1024
ADAPTER_RANK = 32
"""Rank of the adapters with which a run is planned that does not fit otherwise."""
LARGEST_BUDGET = 1 << 17
"""Tokens of a micro-batch beyond which nothing gets faster."""


@dataclass(frozen=True)
class Advice:
    """A forecast, and what to change."""

    forecast: Forecast
    fits: bool
    changes: list[SettingChange] = field(default_factory=list)
    """Settings with which the run fits, by the same forecast. Empty if it fits already, or if nothing
    helps."""
    room: list[SettingChange] = field(default_factory=list)
    """Larger micro-batches that fit too."""
    cluster: PlannedCluster | None = None
    """The smallest cluster of such devices that is enough, if no setting helps."""
    settings_there: list[SettingChange] = field(default_factory=list)
    """What to set on that cluster."""
    adapters: list[SettingChange] = field(default_factory=list)
    """With LoRA, or else with LoRA on 4-bit weights, the run fits these devices, where no other setting
    helps. It is a choice of the user: the run trains something else then."""

    @property
    def hopeless(self) -> bool:
        return not self.fits and not self.changes


def advise(config: TrainingConfig, cluster: PlannedCluster) -> Advice:
    """The forecast of a run on a cluster, with settings or a larger cluster if it does not fit."""
    found = forecast(job_of(config, cluster))
    if fits(found):
        return Advice(found, True, room=larger_micro_batches(config, cluster))
    changes = rescue(config, cluster)
    if changes is not None:
        return Advice(found, False, changes)
    larger, settings = enough_devices(config, cluster)
    adapters = with_adapters(config, cluster)
    return Advice(found, False, cluster=larger, settings_there=settings, adapters=adapters)


def _fits_with(config: TrainingConfig, cluster: PlannedCluster, *changes: SettingChange) -> bool:
    return fits(forecast(job_of(changed(config, *changes), cluster)))


# --- settings with which a run fits -------------------------------------------------------------------------


def rescue(config: TrainingConfig, cluster: PlannedCluster) -> list[SettingChange] | None:
    """The fewest settings with which the run fits; None if there are none."""
    taken: dict[str, SettingChange] = {}
    for _ in range(MAX_CHANGES):
        current = changed(config, *taken.values())
        found = forecast(job_of(current, cluster))
        if fits(found):
            return _pruned(config, cluster, list(taken.values()))
        change = _helpful(current, cluster, found)
        if change is None:
            return None
        first = taken.get(change.key, change)
        taken[change.key] = SettingChange(change.key, first.was, change.value, change.why)
    return None


def _helpful(config: TrainingConfig, cluster: PlannedCluster, found: Forecast) -> SettingChange | None:
    """The first change after which less memory is missing."""
    for change in candidates(config, cluster, found):
        if lack(forecast(job_of(changed(config, change), cluster))) < lack(found):
            return change
    return None


def _pruned(
    config: TrainingConfig, cluster: PlannedCluster, changes: list[SettingChange]
) -> list[SettingChange]:
    """The changes without those that later ones made unnecessary, and with the largest micro-batches that fit
    with the remaining ones."""
    for change in list(changes):
        others = [other for other in changes if other is not change]
        if _fits_with(config, cluster, *others):
            changes = others
    for one in job_of(config, cluster).passes:
        mine = next((change for change in changes if change.key == one.key), None)
        if mine is None:
            continue
        others = [change for change in changes if change is not mine]
        for size in reversed(micro_sizes(one, one.size)):
            larger = SettingChange(mine.key, mine.was, size, mine.why)
            if _fits_with(config, cluster, *others, larger):
                changes = [*others, larger]
                break
    return changes


def enough_devices(
    config: TrainingConfig, cluster: PlannedCluster
) -> tuple[PlannedCluster | None, list[SettingChange]]:
    """The first cluster on which the run fits with the right settings, doubling the devices each time."""
    per_node = cluster.per_node
    nodes = cluster.nodes
    while nodes <= MAX_NODES:
        if per_node < 8:
            per_node *= 2
        else:
            nodes *= 2
        larger = PlannedCluster(cluster.device, nodes, per_node)
        changes = rescue(config, larger)
        if changes is not None:
            return larger, changes
    return None, []


def with_adapters(config: TrainingConfig, cluster: PlannedCluster) -> list[SettingChange]:
    """LoRA, or LoRA on 4-bit weights, with the other settings that the run needs then to fit. Empty if it
    does not fit, or cannot have adapters."""
    job = job_of(config, cluster)
    if any(read(config, f"{path}.fsdp_config.expert_parallel_size") != 1 for path in job.paths.values()):
        return []  # experts that are divided have no adapters
    lora = []
    four_bit = []
    for path in job.model_paths.values():
        if not (read(config, f"{path}.lora_rank") or read(config, f"{path}.lora_adapter_path")):
            lora.append(SettingChange(f"{path}.lora_rank", 0, ADAPTER_RANK, "adapters are trained alone"))
        if read(config, f"{path}.quantization") is None:
            four_bit.append(SettingChange(f"{path}.quantization", None, "nf4", "frozen weights have 4 bits"))
    attempts = [lora]
    if _can_have_four_bits(config, cluster):
        attempts.append([*lora, *four_bit])
    for first in attempts:
        further = rescue(changed(config, *first), cluster) if first else None
        if further is not None:
            return [*first, *further]
    return []


def _can_have_four_bits(config: TrainingConfig, cluster: PlannedCluster) -> bool:
    """4-bit weights need one device that holds them whole, and an engine that samples from them."""
    if isinstance(config, PpoConfig):
        group = config.actor_rollout_ref
        plain = group.rollout.quantization is None and group.rollout.name in SHARED_MODULE_ENGINES
        strategies = {group.actor.strategy, config.critic.strategy}
    else:
        plain = True
        strategies = {config.model.strategy}
    return cluster.ranks == 1 and plain and "megatron" not in strategies


# --- other settings of a run that fits ----------------------------------------------------------------------


def larger_micro_batches(config: TrainingConfig, cluster: PlannedCluster) -> list[SettingChange]:
    """The largest micro-batch of every pass that fits, if it is larger than the setting."""
    found = []
    for one in job_of(config, cluster).passes:
        for size in reversed(micro_sizes(one, _largest_micro_batch(one))):
            if size <= one.size:
                break
            change = SettingChange(one.key, one.size, size, f"{one.phase} would take more at a time")
            if _fits_with(config, cluster, change):
                found.append(change)
                break
    return found


def _largest_micro_batch(one: Pass) -> int:
    """No micro-batch is larger than a step, and none needs more tokens than the largest budget."""
    if one.by_tokens:
        return min(LARGEST_BUDGET, one.total.all)
    rows = max(1, one.total.all // max(1, one.longest))
    return min(LARGEST_BUDGET // one.longest, rows)


def alternatives(config: TrainingConfig, cluster: PlannedCluster) -> list[tuple[SettingChange, Forecast]]:
    """The effect of each setting alone: the change, and the forecast with it."""
    turned = []
    for key, value in _alternative_values(config, cluster).items():
        now = read(config, key)
        if now != value:
            change = SettingChange(key, now, value, "")
            turned.append((change, forecast(job_of(changed(config, change), cluster))))
    return turned


def _alternative_values(config: TrainingConfig, cluster: PlannedCluster) -> dict[str, object]:
    """Another value of every setting that changes memory use."""
    job = job_of(config, cluster)
    values: dict[str, object] = {}
    for path in job.model_paths.values():
        key = f"{path}.gradient_checkpointing"
        if read(config, key) is None:
            key = f"{path}.enable_gradient_checkpointing"
            values[key] = not read(config, key)
        else:
            values[key] = "none" if read(config, key) == "full" else "full"
    for one in job.passes:
        if one.learns:
            minimum = 1
            if one.by_tokens:
                minimum = one.longest
            values[one.key] = max(minimum, one.size // 2)
    for role in job.models:
        if role in job.paths:
            key = f"{job.paths[role]}.fsdp_config.offload_policy"
            values[key] = not read(config, key)
    return values | _alternative_engine_values(job)


def _alternative_engine_values(job: PlannedJob) -> dict[str, object]:
    sampler = job.sampler
    if sampler is None:
        return {}
    values: dict[str, object] = {
        f"{ROLLOUT}.gpu_memory_utilization": round(min(0.9, sampler.share + 0.1), 2),
        f"{ROLLOUT}.max_num_seqs": max(1, sampler.max_rows // 2),
    }
    size = sampler.tensor * 2
    if can_share(sampler.shape, size, job.cluster):
        values[f"{ROLLOUT}.tensor_model_parallel_size"] = size
    return values


# --- one paragraph about a run that does not fit ------------------------------------------------------------


def complaint(advice: Advice) -> str:
    """Which phase of a run does not fit, what fills it, and what to set."""
    text = _problem(advice.forecast)
    if advice.changes:
        return f"{text} Set {' '.join(map(str, advice.changes))}."
    kind = _kind_of_adapters(advice)
    other = f" without {kind}" if kind else ""
    if advice.cluster is not None:
        larger = advice.cluster
        text += f" No setting helps on this many devices{other}; {larger.nodes} x {larger.per_node} of them"
        text += " would do"
        if advice.settings_there:
            text += f", with {' '.join(map(str, advice.settings_there))}"
    elif kind:
        text += f" No setting and no number of such devices helps{other}"
    else:
        text += f" No setting and no number of such devices helps: {_last_resort(advice.forecast)}"
    if kind:
        text += f". With {kind} it fits these devices: set {' '.join(map(str, advice.adapters))}"
    return f"{text}."


def _kind_of_adapters(advice: Advice) -> str:
    """The usual name of what advice.adapters do; empty if there are none."""
    if not advice.adapters:
        return ""
    if any(change.key.endswith(".quantization") for change in advice.adapters):
        return "QLoRA"
    return "LoRA"


def _problem(found: Forecast) -> str:
    if only_starved(found):
        sampler = found.job.sampler
        assert sampler is not None
        need = sampler.capacity * sampler.per_token / GIB
        return (
            f"The engine has {found.cache / GIB:.2f} GiB for its cache, and one sequence of "
            f"{sampler.capacity} tokens needs {need:.2f} GiB."
        )
    phase = worst(found)
    memory = found.memory / GIB
    largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in phase.largest_parts[:3])
    has = f"the device has {memory:.1f}"
    if phase.total <= found.memory:
        has = f"of the device's {memory:.1f} a plan leaves {1 - SAFE:.0%} free"
    return f"{phase.name} needs {phase.total / GIB:.1f} GiB, and {has} ({largest} GiB)."


def _last_resort(found: Forecast) -> str:
    """What may help if no setting does."""
    engine = found.peak.roles.get("engine", {}).get("weights", 0)
    if engine < found.memory / 2:
        return "use shorter sequences or a smaller model"
    if found.job.engine != "native":
        return (
            f"with {found.job.engine} every rank keeps a whole copy of the weights; {ROLLOUT}.name=native "
            "divides it"
        )
    return (
        "every rank's engine has a whole copy of the weights, and mixtures of experts are not divided; take "
        "larger devices"
    )
