"""The numbers of a step's episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strop.agents.episode import Episode
from strop.algorithms.metrics.data import count_metrics


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """agent/...: failures, why conversations ended, what happened in them. timing_s/agent_loop/...: verl's names."""
    if not episodes:
        return {}
    happened: Counter[str] = Counter()
    for episode in episodes:
        happened.update(episode.counts)
    ends = Counter(episode.stopped for episode in episodes if episode.stopped)
    metrics: dict[str, float] = {
        "agent/episodes": len(episodes),
        "agent/failed": sum(episode.error is not None for episode in episodes),
        **{f"agent/stopped/{reason}": count for reason, count in ends.items()},
        **{f"agent/{name}": count for name, count in happened.items()},
        **count_metrics("agent/assistant_turns", [episode.assistant_turns for episode in episodes]),
    }
    for name in ("generate_sequences", "tool_calls"):
        metrics |= count_metrics(f"timing_s/agent_loop/{name}", [episode.seconds[name] for episode in episodes])
    slowest = max(episodes, key=lambda episode: sum(episode.seconds.values()))
    metrics |= {f"timing_s/agent_loop/slowest/{name}": seconds for name, seconds in slowest.seconds.items()}
    metrics["timing_s/agent_loop/slowest/prompt_length"] = len(slowest.prompt.ids)
    metrics["timing_s/agent_loop/slowest/response_length"] = len(slowest)
    return metrics
