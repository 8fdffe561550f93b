"""Validation: the held-out prompts answered, scored and summed up per data source."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from strop.algorithms.metrics.training import StepRecord
from strop.algorithms.metrics.validation import name_validation_metrics, validation_metrics
from strop.data.loader import Loader
from strop.ppo.collect import Collector
from strop.rollout.base import Sampling
from strop.types import Trajectory


@dataclass
class Validator:
    loader: Loader
    collector: Collector
    """Shares the engine and the scorer with training."""
    sampling: Sampling
    samples_per_prompt: int

    def run(self, step: int, record: StepRecord) -> list[Trajectory]:
        """Answer every validation prompt and add val-core/... and val-aux/... to the record."""
        trajectories: list[Trajectory] = []
        groups = 0
        with self.collector.awake():
            for prompts in self.loader:
                trajectories += self.collector.generate(
                    prompts, self.sampling, self.samples_per_prompt, step, groups
                )
                groups += len(prompts)
        report = self.collector.score(trajectories)
        record.add(report.metrics, prefix="val-aux/")
        record.add(self.collector.episode_metrics(), prefix="val-aux/")
        record.add(summarise(trajectories))
        return trajectories


def summarise(trajectories: list[Trajectory]) -> dict[str, float]:
    """mean@N, best@N, maj@N ... of every number the scorer reported; failed samples are left out and
    counted."""
    scored = [t for t in trajectories if t.score is not None]
    metrics: dict[str, float] = {"val-aux/failed": len(trajectories) - len(scored)}
    if scored:
        infos: dict[str, list[Any]] = {"reward": [t.reward for t in scored]}
        for name in sorted({name for t in scored for name in t.extras}):
            values = [t.extras.get(name) for t in scored]
            if all(value is None or isinstance(value, numbers.Real | str) for value in values):
                infos[name] = values
        sources = [t.prompt.data_source for t in scored]
        metrics |= name_validation_metrics(validation_metrics(sources, [str(t.group) for t in scored], infos))
        turns = [t.num_turns for t in scored]
        metrics |= {
            "val-aux/num_turns/min": min(turns),
            "val-aux/num_turns/max": max(turns),
            "val-aux/num_turns/mean": sum(turns) / len(turns),
        }
    return metrics
