"""A plan as text for a terminal, and as plain values for JSON."""

from __future__ import annotations

from strop.planning.advice import Advice, complaint
from strop.planning.devices import GIB
from strop.planning.forecast import Forecast, Phase
from strop.planning.knobs import SettingChange, as_word, fits
from strop.planning.parallel_sizes import SHOWN, SizedRun
from strop.planning.times import save_seconds, seconds

ROLES = ("actor", "model", "reference", "teacher", "critic", "reward", "engine", "process")
"""Columns of the table, in order."""


def step_seconds(found: Forecast) -> float:
    return sum(seconds(found).values())


# --- text ---------------------------------------------------------------------------------------------------


def as_text(advice: Advice, turned: list[tuple[SettingChange, Forecast]]) -> str:
    """The plan for a terminal; `turned` are the alternatives, one setting each."""
    found = advice.forecast
    lines = [_head(found), "", *_phases(found), "", *_facts(found), "", *_verdict(advice)]
    if turned:
        lines += ["", "each key alone", *_knobs(found, turned)]
    return "\n".join(lines) + "\n"


def sizes_text(runs: list[SizedRun]) -> str:
    """Parallel sizes of strategy=megatron, fastest first."""
    if not runs:
        return "\nno parallel sizes fit these devices\n"
    rows = [["TP", "PP", "CP", "EP", "DP", "peak GiB", "training s", ""]]
    for run in runs[:SHOWN]:
        of = run.division
        uneven = ""
        if run.last_stage is not None:
            uneven = f"num_layers_in_last_pipeline_stage={run.last_stage}"
        sizes = [str(size) for size in (of.tensor, of.stages, of.context, of.experts, of.data)]
        rows.append([*sizes, f"{run.peak / GIB:.1f}", f"{run.seconds:.0f}", uneven])
    return "\n".join(["", f"parallel sizes that fit ({len(runs)}), fastest first", *_aligned(rows)]) + "\n"


def _head(found: Forecast) -> str:
    cluster = found.job.cluster
    models = ", ".join(f"{role} {_count(model.shape.parameters)}" for role, model in found.job.models.items())
    memory = f"{found.memory / GIB:.1f} GiB each"
    return f"{cluster.nodes} x {cluster.per_node} {cluster.device.name} ({memory}): {models}"


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.0f}M"


def _phases(found: Forecast) -> list[str]:
    """GiB on one rank at the peak of each phase, by role."""
    roles = [role for role in ROLES if any(role in phase.roles for phase in found.phases)]
    rows = [["phase", "seconds", "GiB", "share", *roles]]
    for phase in found.phases:
        taken = [f"{sum(phase.roles.get(role, {}).values()) / GIB:.1f}" for role in roles]
        share = f"{phase.total / found.memory:.0%}"
        rows.append([phase.name, _time(phase, found), f"{phase.total / GIB:.1f}", share, *taken])
    return _aligned(rows)


def _time(phase: Phase, found: Forecast) -> str:
    """Seconds of a phase; in brackets if it runs in the background."""
    spent = seconds(found)
    if phase.name in spent:
        return f"{spent[phase.name]:.1f}"
    if phase.name == "save":
        return f"({save_seconds(found.job):.0f})"
    return "-"


def _facts(found: Forecast) -> list[str]:
    sampler = found.job.sampler
    peak = found.peak
    largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in peak.largest_parts[:4] if size)
    lines = [f"peak: {peak.name}, of which {largest}"]
    if sampler is not None:
        lines.append(
            f"engine: {found.job.engine}, cache {found.cache / GIB:.1f} GiB ({sampler.per_token} bytes per "
            f"token), {found.rows} of {sampler.sequences} sequences at a time to the longest end"
        )
    lines.append(f"a step: {step_seconds(found):.0f} s; host memory per machine: {found.host / GIB:.0f} GiB")
    return lines


def _verdict(advice: Advice) -> list[str]:
    if advice.fits:
        return ["fits", *(f"  room for {change} (now {as_word(change.was)})" for change in advice.room)]
    lines = [f"does not fit: {complaint(advice)}"]
    for change in [*advice.changes, *advice.adapters]:
        lines.append(f"  {change}  (was {as_word(change.was)}): {change.why}")
    return lines


def _knobs(found: Forecast, turned: list[tuple[SettingChange, Forecast]]) -> list[str]:
    rows = [["", "peak GiB", "step s", ""]]
    for change, other in turned:
        more = (other.peak.total - found.peak.total) / GIB
        verdict = "does not fit"
        if fits(other):
            verdict = "fits"
        peak = f"{other.peak.total / GIB:.1f} ({more:+.1f})"
        rows.append([str(change), peak, f"{step_seconds(other):.0f}", verdict])
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Lines with columns of equal width: the first one left-aligned, the other ones right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:]):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


# --- plain values -------------------------------------------------------------------------------------------


def as_values(advice: Advice, turned: list[tuple[SettingChange, Forecast]]) -> dict[str, object]:
    """The plan for JSON."""
    found = advice.forecast
    cluster = found.job.cluster
    problem = None
    if not advice.fits:
        problem = complaint(advice)
    enough = None
    if advice.cluster is not None:
        enough = [advice.cluster.nodes, advice.cluster.per_node]
    return {
        "fits": advice.fits,
        "device": cluster.device.name,
        "memory": found.memory,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "parameters": {role: model.shape.parameters for role, model in found.job.models.items()},
        "phases": [_phase_values(phase) for phase in found.phases],
        "seconds": {**seconds(found), "save": save_seconds(found.job)},
        "cache_bytes": found.cache,
        "sequences_at_a_time": found.rows,
        "host_bytes": found.host,
        "problem": problem,
        "changes": [_change_values(change) for change in advice.changes],
        "adapters": [_change_values(change) for change in advice.adapters],
        "room": [_change_values(change) for change in advice.room],
        "enough": enough,
        "knobs": [_knob_values(change, other) for change, other in turned],
    }


def _phase_values(phase: Phase) -> dict[str, object]:
    return {
        "phase": phase.name,
        "bytes": phase.total,
        "allocated": phase.allocated,
        "roles": phase.roles,
        "key": phase.key,
    }


def _change_values(change: SettingChange) -> dict[str, object]:
    return {"key": change.key, "was": change.was, "value": change.value}


def _knob_values(change: SettingChange, other: Forecast) -> dict[str, object]:
    return {
        "key": change.key,
        "value": change.value,
        "peak": other.peak.total,
        "seconds": step_seconds(other),
    }
