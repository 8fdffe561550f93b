"""How old the weights were that sampled what is trained on, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from strop.types import Trajectory


def ages(trajectory: Trajectory, step: int) -> list[tuple[int, int]]:
    """(age, sampled tokens) in order; the weights that step `step` begins with are those of version step - 1, of age 0."""
    stretches = trajectory.versions or [(trajectory.version, trajectory.sampled)]
    return [(step - 1 - version, count) for version, count in stretches]


def staleness(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """Ages in training steps: over all sampled tokens, and the shares of samples that are old or of several versions."""
    per_sample = [ages(t, step) for t in trajectories]
    stretches = [stretch for sample in per_sample for stretch in sample if stretch[1]]
    tokens = sum(count for _, count in stretches)
    if not tokens:
        return {}
    return {
        "staleness/mean": sum(age * count for age, count in stretches) / tokens,
        "staleness/max": max(age for age, _ in stretches),
        "staleness/old_samples": sum(any(age > 0 for age, _ in sample) for sample in per_sample) / len(per_sample),
        "staleness/mixed_samples": sum(len(sample) > 1 for sample in per_sample) / len(per_sample),
    }
