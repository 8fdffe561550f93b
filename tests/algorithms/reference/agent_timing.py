"""Timing metrics of agent loops under the names of verl."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def agent_timing_metrics(
    *,
    generate_sequences: Sequence[float],
    tool_calls: Sequence[float],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    num_preempted: Sequence[int] | None = None,
) -> dict[str, float]:
    """Seconds each episode spent generating and in tools, and a portrait of the slowest episode, which the
    step waits for."""
    if len(generate_sequences) == 0:
        return {}
    columns: dict[str, Sequence[float]] = {"generate_sequences": generate_sequences, "tool_calls": tool_calls}
    if num_preempted is not None:
        columns["num_preempted"] = num_preempted
    shown = {**columns, "prompt_length": prompt_lengths, "response_length": response_lengths}
    for name, column in shown.items():
        if len(column) != len(generate_sequences):
            raise ValueError(
                f"`{name}` has {len(column)} entries, `generate_sequences` {len(generate_sequences)}; one "
                "per episode."
            )
    prefix = "timing_s/agent_loop"
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        array = np.asarray(column)
        metrics |= {f"{prefix}/{name}/{how}": float(getattr(array, how)()) for how in ("min", "max", "mean")}
    slowest = int(np.argmax(np.asarray(generate_sequences) + np.asarray(tool_calls)))
    return metrics | {f"{prefix}/slowest/{name}": float(column[slowest]) for name, column in shown.items()}
