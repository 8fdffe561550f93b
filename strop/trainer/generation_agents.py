"""Rows with an agent_name in `strop generate`: the same loops as in training, and the text that a scorer would see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from strop.agents.episode import Episode
from strop.agents.runner import EpisodeRunner, Start
from strop.rewards.sample import response_texts
from strop.rollout.base import Sampling
from strop.types import Prompt


def converse(
    runner: EpisodeRunner, prompts: Mapping[int, Prompt], sampling: Sampling, n: int, *, seed: int
) -> dict[int, list[Episode]]:
    """n episodes of each row, ended."""
    starts = [Start(prompt, sampling, (seed, row, i), row) for row, prompt in prompts.items() for i in range(n)]
    found: defaultdict[int, list[Episode]] = defaultdict(list)
    for start, episode in zip(starts, runner.run(starts, all_may_fail=True), strict=True):
        found[start.group].append(episode)
    return dict(found)


def said(episodes: list[Episode], tokenizer: Any) -> list[str] | dict[str, str]:
    """What the model said in each episode, its turns on lines of their own; or the error of the first that failed."""
    error = next((episode.error for episode in episodes if episode.error is not None), None)
    if error is not None:
        return {"error": f"{type(error).__name__}: {error}"}
    return response_texts([episode.trajectory() for episode in episodes], tokenizer, whole_transcript=False)
