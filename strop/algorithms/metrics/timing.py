"""Where the seconds went, per phase and per token, and the throughput of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

OVER_RESPONSE_TOKENS = ("gen",)
OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


def timing_metrics(seconds: Mapping[str, float], *, response_tokens: int, total_tokens: int) -> dict[str, float]:
    """`timing_s/<phase>` for every phase, and `timing_per_token_ms/<phase>` for the phases whose work grows with tokens.

    Generation is divided by the tokens it made, the rest by prompt and response tokens together.
    """
    metrics = {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
    for phases, tokens in ((OVER_RESPONSE_TOKENS, response_tokens), (OVER_ALL_TOKENS, total_tokens)):
        if tokens > 0:
            metrics |= {f"timing_per_token_ms/{p}": seconds[p] * 1000 / tokens for p in phases if p in seconds}
    return metrics


def throughput_metrics(*, total_tokens: int, step_seconds: float, devices: int) -> dict[str, float]:
    """Tokens of the step, its wall time, and tokens per second per device."""
    if devices < 1 or step_seconds <= 0:
        raise ValueError(f"Throughput needs devices >= 1 and a positive step time, got {devices} and {step_seconds}.")
    return {
        "perf/total_num_tokens": total_tokens,
        "perf/time_per_step": step_seconds,
        "perf/throughput": total_tokens / (step_seconds * devices),
    }


def agent_timing_metrics(
    *,
    generate_sequences: Sequence[float],
    tool_calls: Sequence[float],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    num_preempted: Sequence[int] | None = None,
) -> dict[str, float]:
    """Seconds each episode spent generating and in tools, and a portrait of the slowest episode, which the step waits for."""
    if len(generate_sequences) == 0:
        return {}
    columns: dict[str, Sequence[float]] = {"generate_sequences": generate_sequences, "tool_calls": tool_calls}
    if num_preempted is not None:
        columns["num_preempted"] = num_preempted
    shown = {**columns, "prompt_length": prompt_lengths, "response_length": response_lengths}
    for name, column in shown.items():
        if len(column) != len(generate_sequences):
            raise ValueError(
                f"`{name}` has {len(column)} entries, `generate_sequences` {len(generate_sequences)}; one per episode."
            )
    prefix = "timing_s/agent_loop"
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        array = np.asarray(column)
        metrics |= {f"{prefix}/{name}/{how}": float(getattr(array, how)()) for how in ("min", "max", "mean")}
    slowest = int(np.argmax(np.asarray(generate_sequences) + np.asarray(tool_calls)))
    return metrics | {f"{prefix}/slowest/{name}": float(column[slowest]) for name, column in shown.items()}
