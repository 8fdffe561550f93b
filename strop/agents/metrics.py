"""The metrics of a step's episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.agents.episode import Episode
from strop.algorithms.metrics.training import count_metrics


@dataclass(frozen=True)
class EpisodeFacts:
    """What the metrics need of a finished episode; ranks send these to each other."""

    failed: bool
    stopped: str
    """Why it ended; empty: the model ended it."""
    counts: dict[str, int]
    assistant_turns: int
    seconds: dict[str, float]
    prompt_length: int
    response_length: int

    @staticmethod
    def of(episode: Episode) -> EpisodeFacts:
        return EpisodeFacts(
            failed=episode.error is not None,
            stopped=episode.stopped,
            counts=dict(episode.counts),
            assistant_turns=episode.assistant_turns,
            seconds=dict(episode.seconds),
            prompt_length=len(episode.prompt.ids),
            response_length=len(episode),
        )


def episode_metrics(episodes: Sequence[EpisodeFacts]) -> dict[str, float]:
    """Return the metrics of a step's episodes.

    agent/...: failures, why conversations ended, events. timing_s/agent_loop/...: verl's names.
    """
    if not episodes:
        return {}
    metrics: dict[str, float] = {
        "agent/episodes": len(episodes),
        "agent/failed": sum(episode.failed for episode in episodes),
    }
    ends = Counter(episode.stopped for episode in episodes if episode.stopped)
    for reason, count in ends.items():
        metrics[f"agent/stopped/{reason}"] = count
    events: Counter[str] = Counter()
    for episode in episodes:
        events.update(episode.counts)
    for name, count in events.items():
        metrics[f"agent/{name}"] = count
    metrics |= count_metrics("agent/assistant_turns", [episode.assistant_turns for episode in episodes])
    for name in ("generate_sequences", "tool_calls"):
        seconds = [episode.seconds[name] for episode in episodes]
        metrics |= count_metrics(f"timing_s/agent_loop/{name}", seconds)
    slowest = max(episodes, key=lambda episode: sum(episode.seconds.values()))
    for name, duration in slowest.seconds.items():
        metrics[f"timing_s/agent_loop/slowest/{name}"] = duration
    metrics["timing_s/agent_loop/slowest/prompt_length"] = slowest.prompt_length
    metrics["timing_s/agent_loop/slowest/response_length"] = slowest.response_length
    return metrics
