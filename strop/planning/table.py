"""A plan as text for a terminal, and as plain values for JSON."""

from __future__ import annotations

from typing import Any

from strop.planning.advice import Advice, complaint, step_seconds
from strop.planning.forecast import Forecast, Phase
from strop.planning.knobs import Change, fits
from strop.planning.times import save_seconds, seconds

GIB = 2**30
ROLES = ("actor", "model", "reference", "critic", "reward", "engine", "process")


def as_text(advice: Advice, turned: list[tuple[Change, Forecast]]) -> str:
    found = advice.forecast
    lines = [_head(found), "", *_phases(found), "", *_facts(found), "", *_verdict(advice)]
    if turned:
        lines += ["", "each knob alone", *_knobs(found, turned)]
    return "\n".join(lines) + "\n"


def _head(found: Forecast) -> str:
    cluster = found.job.cluster
    models = ", ".join(f"{role} {_count(model.shape.parameters)}" for role, model in found.job.models.items())
    return f"{cluster.nodes} x {cluster.per_node} {cluster.device.name} ({found.memory / GIB:.1f} GiB each): {models}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _phases(found: Forecast) -> list[str]:
    """GiB on one rank at the peak of each phase, by role."""
    roles = [role for role in ROLES if any(role in phase.roles for phase in found.phases)]
    spent = seconds(found)
    rows = [["phase", "seconds", "GiB", "share", *roles]]
    for phase in found.phases:
        taken = [f"{sum(phase.roles.get(role, {}).values()) / GIB:.1f}" for role in roles]
        time = f"{spent[phase.name]:.1f}" if phase.name in spent else _beside(phase, found)
        rows.append([phase.name, time, f"{phase.total / GIB:.1f}", f"{phase.total / found.memory:.0%}", *taken])
    return _aligned(rows)


def _beside(phase: Phase, found: Forecast) -> str:
    return f"({save_seconds(found.job):.0f})" if phase.name == "save" else "-"


def _facts(found: Forecast) -> list[str]:
    job, peak = found.job, found.peak
    parts = sorted(
        ((size, f"{role} {part}") for role, parts in peak.roles.items() for part, size in parts.items()), reverse=True
    )
    lines = [f"peak: {peak.name}, of which " + ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts[:4] if size)]
    if job.sampler is not None:
        lines.append(
            f"engine: {job.engine}, cache {found.cache / GIB:.1f} GiB ({job.sampler.per_token} bytes per token), "
            f"{found.rows} of {job.sampler.sequences} sequences at a time to the longest end"
        )
    lines.append(f"a step: {step_seconds(found):.0f} s; host memory per machine: {found.host / GIB:.0f} GiB")
    return lines


def _verdict(advice: Advice) -> list[str]:
    if not advice.fits:
        lines = [f"does not fit: {complaint(advice)}"]
        return lines + [f"  {change}  (was {change.was}): {change.why}" for change in advice.changes]
    return ["fits"] + [f"  room for {change} (now {change.was})" for change in advice.room]


def _knobs(found: Forecast, turned: list[tuple[Change, Forecast]]) -> list[str]:
    rows = [["", "peak GiB", "step s", ""]]
    for change, other in turned:
        more = (other.peak.total - found.peak.total) / GIB
        rows.append(
            [
                str(change),
                f"{other.peak.total / GIB:.1f} ({more:+.1f})",
                f"{step_seconds(other):.0f}",
                "fits" if fits(other) else "does not fit",
            ]
        )
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def as_values(advice: Advice, turned: list[tuple[Change, Forecast]]) -> dict[str, Any]:
    found = advice.forecast
    cluster = found.job.cluster
    return {
        "fits": advice.fits,
        "device": cluster.device.name,
        "memory": found.memory,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "parameters": {role: model.shape.parameters for role, model in found.job.models.items()},
        "phases": [
            {"phase": phase.name, "bytes": phase.total, "allocated": phase.allocated, "roles": phase.roles, "key": phase.key}
            for phase in found.phases
        ],
        "seconds": {**seconds(found), "save": save_seconds(found.job)},
        "cache_bytes": found.cache,
        "sequences_at_a_time": found.rows,
        "host_bytes": found.host,
        "problem": None if advice.fits else complaint(advice),
        "changes": [{"key": change.key, "was": change.was, "value": change.value} for change in advice.changes],
        "room": [{"key": change.key, "was": change.was, "value": change.value} for change in advice.room],
        "enough": None if advice.cluster is None else [advice.cluster.nodes, advice.cluster.per_node],
        "knobs": [
            {"key": change.key, "value": change.value, "peak": other.peak.total, "seconds": step_seconds(other)}
            for change, other in turned
        ],
    }
