"""single_turn_agent: one answer. Rows that use it are sampled in one batch, without an episode of their own."""

from __future__ import annotations

from strop.agents.episode import Episode


class SingleTurnAgent:
    batched = True

    async def run(self, episode: Episode) -> None:
        await episode.answer()
