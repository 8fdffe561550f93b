"""Parallel sizes for strategy=megatron: those that divide a model and a cluster and fit into memory, by the
seconds that training takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.config.schema.ppo import PpoConfig
from strop.planning.devices import SAFE, PlannedCluster
from strop.planning.forecast import Forecast, Phase, forecast
from strop.planning.job import ACTOR, REFERENCE, job_of
from strop.planning.knobs import SettingChange, changed, fits
from strop.planning.megatron import Division, MegatronModel, last_stage_layers
from strop.planning.shape import Shape
from strop.planning.times import seconds

MOST_STAGES = 32
MOST_CONTEXT = 8
SHOWN = 5
TIE = 0.03
"""Differences in time that arithmetic like this cannot tell apart."""
ROLLOUT_PHASE = "rollout"
_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "stages": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "experts": "expert_model_parallel_size",
}


@dataclass(frozen=True)
class SizedRun:
    """A run with some sizes."""

    division: Division
    forecast: Forecast
    seconds: float
    """Of a step without its rollout, whose time does not depend on the sizes."""
    last_stage: int | None
    """Layers of the last stage if it has fewer than the others."""

    @property
    def peak(self) -> int:
        """Bytes on a training device, at most."""
        return max(phase.total for phase in _on_trainers(self.forecast))


def possible_divisions(shape: Shape, cluster: PlannedCluster) -> Iterator[Division]:
    """Sizes that divide heads, experts and devices. Tensor parallelism stays within a machine. Stages have
    equal numbers of layers, or the last one has fewer."""
    ranks = cluster.ranks
    experts = 1
    if shape.experts is not None:
        experts = shape.experts.count
    for tensor in _powers(cluster.per_node):
        if shape.key_heads % tensor or shape.heads % tensor:
            continue
        for stages in _powers(min(MOST_STAGES, shape.layers)):
            for context in _powers(MOST_CONTEXT):
                if ranks % (tensor * stages * context) or (shape.heads // tensor) % context:
                    continue
                for size in _powers(experts):
                    division = Division(ranks, tensor, stages, context, size)
                    divides = (ranks // stages) % size == 0 and experts % size == 0
                    if divides and last_stage_layers(shape, division) > 0:
                        yield division


def sized_runs(config: PpoConfig, cluster: PlannedCluster, *, fitting: bool = True) -> list[SizedRun]:
    """The run with each possible division of actor and reference, fastest first; only those that fit, or
    all."""
    actor = job_of(config, cluster).models["actor"]
    assert isinstance(actor, MegatronModel)
    found: list[SizedRun] = []
    for division in possible_divisions(actor.shape, cluster):
        predicted = forecast(job_of(changed(config, *settings_of(division)), cluster))
        if fitting and not _trains(predicted):
            continue
        last: int | None = last_stage_layers(actor.shape, division)
        if actor.shape.layers % division.stages == 0:
            last = None
        found.append(SizedRun(division, predicted, _training_seconds(predicted), last))
    return _simplest_first(sorted(found, key=lambda run: run.seconds))


def _trains(found: Forecast) -> bool:
    """Whether all phases fit; engines on machines of their own are not counted."""
    if not found.job.apart:
        return fits(found)
    return all(phase.total <= found.memory * SAFE for phase in _on_trainers(found))


def _on_trainers(found: Forecast) -> list[Phase]:
    if not found.job.apart:
        return found.phases
    return [phase for phase in found.phases if phase.name != ROLLOUT_PHASE]


def _training_seconds(found: Forecast) -> float:
    return sum(spent for phase, spent in seconds(found).items() if phase != ROLLOUT_PHASE)


def _simplest_first(runs: list[SizedRun]) -> list[SizedRun]:
    """Of the runs that are about as fast as the first, those come first whose copies of the model, or of its
    experts, have the fewest ranks; then those that divide experts least."""

    def divided(run: SizedRun) -> tuple[int, int, float]:
        of = run.division
        return max(of.ranks // of.data, of.stages * of.experts), of.experts, run.seconds

    close = [run for run in runs if run.seconds <= runs[0].seconds * (1 + TIE)]
    return sorted(close, key=divided) + runs[len(close) :]


def settings_of(division: Division) -> list[SettingChange]:
    """The keys of a division, for actor and reference."""
    changes = []
    for path in (ACTOR, REFERENCE):
        for name, key in _KEYS.items():
            value = getattr(division, name)
            changes.append(SettingChange(f"{path}.megatron.{key}", 1, value, "a suggested size"))
    return changes


def _powers(limit: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= limit:
        found.append(found[-1] * 2)
    return found
