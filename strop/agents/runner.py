"""Many episodes at once: one coroutine each over one engine, at most `max_concurrency` in flight.

The border of one episode is here: whatever its loop, a tool or an interaction raises ends that episode alone. Its sample is
masked and counted. Only when every episode fails is the loop itself taken to be broken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from strop.agents.episode import Episode
from strop.agents.loops import Loops
from strop.agents.world import World
from strop.rewards.calls import BackgroundLoop
from strop.rollout.base import Sampling
from strop.types import Prompt

log = logging.getLogger(__name__)
FAREWELL_SECONDS = 10.0
"""For episodes that are interrupted to let go of their tools."""


@dataclass(frozen=True)
class Start:
    """One episode that is wanted."""

    prompt: Prompt
    sampling: Sampling
    seeds: tuple[int, ...]
    group: int = 0


class EpisodeRunner:
    def __init__(self, world: World, loops: Loops, *, max_concurrency: int) -> None:
        self.world, self.loops, self.max_concurrency = world, loops, max_concurrency
        self._running: list[asyncio.Future[Episode]] = []
        self._loop = BackgroundLoop("strop-agents")  # one for the whole run: connections of tools live in it

    def run(self, starts: Sequence[Start], *, all_may_fail: bool = False) -> list[Episode]:
        """All episodes, ended, in the order of `starts`."""
        try:
            episodes: list[Episode] = self._loop.start(self._all(starts)).result()
        except KeyboardInterrupt:
            self._loop.run(self._give_up(), timeout=FAREWELL_SECONDS)
            raise
        _complain(episodes, all_may_fail)
        return episodes

    def close(self) -> None:
        """Let go of tools and their connections."""
        self.world.toolbox.close()
        self._loop.close()

    async def _all(self, starts: Sequence[Start]) -> list[Episode]:
        room = asyncio.Semaphore(self.max_concurrency)
        self._running = [asyncio.ensure_future(self._one(start, room)) for start in starts]
        return list(await asyncio.gather(*self._running))

    async def _give_up(self) -> None:
        """Cancel what is running, and wait until tools and interactions were let go of."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _one(self, start: Start, room: asyncio.Semaphore) -> Episode:
        loop = self.loops.get(start.prompt.agent_name)
        async with room:
            episode = Episode(self.world, start.prompt, start.sampling, seeds=start.seeds, group=start.group)
            try:
                await loop.run(episode)
            except Exception as error:  # noqa: BLE001 - the border of one episode: its loop and tools are the user's
                episode.error = error
            return episode


def _complain(episodes: Sequence[Episode], all_may_fail: bool) -> None:
    """One line for the first failure of the step; an error when nothing but failures came."""
    failed = [episode for episode in episodes if episode.error is not None]
    if not failed:
        return
    first, error = failed[0], failed[0].error
    what = f"row {first.prompt.index} of {first.prompt.data_source}: {type(error).__name__}: {error}"
    if len(failed) == len(episodes) and not all_may_fail:
        raise ValueError(
            f"All {len(episodes)} episodes failed, so the agent loop itself must be broken. The first, {what}"
        ) from error
    log.warning("%d of %d episodes failed; their samples are masked. The first, %s", len(failed), len(episodes), what)
