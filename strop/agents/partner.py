"""An interaction in one episode: started, asked, and finalized however the episode ends."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from strop.agents.episode import Episode, EpisodeError, within


@dataclass(frozen=True)
class Partner:
    """Who replies to the policy in one episode."""

    interaction: Any
    instance_id: str
    kwargs: Mapping[str, Any]
    timeout: float

    async def reply(self, episode: Episode) -> tuple[bool, str]:
        """Judge the latest answer (its reward is booked) and reply to it: whether that is the end, and what is said."""
        work = self.interaction.generate_response(self.instance_id, episode.messages, **self.kwargs)
        reply = await episode.waiting(within(work, self.timeout, f"the interaction {self.name}"))
        try:
            ends, text, amount, numbers = reply
        except (TypeError, ValueError) as error:
            raise EpisodeError(
                f"the interaction {self.name} returned {reply!r}; generate_response gives (should_stop, text, reward, numbers)."
            ) from error
        episode.reward(float(amount))
        episode.extras.update(numbers or {})
        episode.counts["interactions"] += 1
        return bool(ends), str(text)

    @property
    def name(self) -> str:
        return str(getattr(self.interaction, "name", type(self.interaction).__name__))


@asynccontextmanager
async def partner_of(episode: Episode) -> AsyncIterator[Partner | None]:
    """The interaction that the row asks for, or None."""
    kwargs = dict(episode.prompt.extra_info.get("interaction_kwargs") or {})
    interaction = episode.world.interactions.choose(kwargs)
    if interaction is None:
        yield None
        return
    kwargs.pop("name", None)
    limit = episode.world.limits.call_timeout
    started = uuid.uuid4().hex
    started = await within(interaction.start_interaction(started, **kwargs), limit, "start_interaction") or started
    partner = Partner(interaction, started, kwargs, limit)
    try:
        yield partner
        if hasattr(interaction, "calculate_score"):
            work = interaction.calculate_score(started, **kwargs)
            episode.extras["interaction_score"] = float(await within(work, limit, "calculate_score"))
    finally:
        if hasattr(interaction, "finalize_interaction"):
            await within(interaction.finalize_interaction(started, **kwargs), limit, "finalize_interaction")
