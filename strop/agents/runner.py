"""Many episodes at once: one coroutine each over one engine, at most `max_concurrency` at a time.

An exception of a loop, a tool or an interaction ends only its own episode: the sample is masked and counted.
When every episode fails, the loop itself counts as broken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from strop.agents.context import EpisodeContext
from strop.agents.episode import Episode
from strop.agents.loops import AgentLoops
from strop.concurrency import BackgroundLoop
from strop.rollout.base import Sampling
from strop.types import Prompt

log = logging.getLogger(__name__)
CLOSING_SECONDS = 10.0
"""Seconds for interrupted episodes to release their tools."""


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run."""

    prompt: Prompt
    sampling: Sampling
    seeds: tuple[int, ...]
    group: int = 0


class EpisodeRunner:
    """Runs episodes for the whole run."""

    def __init__(self, context: EpisodeContext, loops: AgentLoops, *, max_concurrency: int) -> None:
        self.context = context
        self.loops = loops
        self.max_concurrency = max_concurrency
        self._running: list[asyncio.Future[Episode]] = []
        self._event_loop = BackgroundLoop("strop-agents")  # one for the run: connections of tools live in it

    def run(self, requests: Sequence[EpisodeRequest], *, all_may_fail: bool = False) -> list[Episode]:
        """Return all episodes, ended, in the order of `requests`."""
        try:
            episodes: list[Episode] = self._event_loop.start(self._run_all(requests)).result()
        except KeyboardInterrupt:
            self._event_loop.run(self._cancel(), timeout=CLOSING_SECONDS)
            raise
        _report_failures(episodes, all_may_fail)
        return episodes

    def close(self) -> None:
        """Close the tools and their connections."""
        self.context.tools.close()
        self._event_loop.close()

    async def _run_all(self, requests: Sequence[EpisodeRequest]) -> list[Episode]:
        semaphore = asyncio.Semaphore(self.max_concurrency)
        self._running = [asyncio.ensure_future(self._run_one(request, semaphore)) for request in requests]
        return list(await asyncio.gather(*self._running))

    async def _cancel(self) -> None:
        """Cancel the running episodes, and wait until they have released tools and interactions."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run_one(self, request: EpisodeRequest, semaphore: asyncio.Semaphore) -> Episode:
        loop = self.loops.get(request.prompt.agent_name)
        async with semaphore:
            episode = Episode(
                self.context, request.prompt, request.sampling, seeds=request.seeds, group=request.group
            )
            try:
                await loop.run(episode)
            except Exception as error:  # noqa: BLE001 - loops and tools are user code, and may raise anything
                episode.error = error
            return episode


def _report_failures(episodes: Sequence[Episode], all_may_fail: bool) -> None:
    """Log the first failure of the step; ValueError when all episodes have failed."""
    failed = [episode for episode in episodes if episode.error is not None]
    if not failed:
        return
    first = failed[0]
    error = first.error
    what = f"row {first.prompt.index} of {first.prompt.data_source}: {type(error).__name__}: {error}"
    if len(failed) == len(episodes) and not all_may_fail:
        raise ValueError(
            f"All {len(episodes)} episodes failed, so the agent loop itself must be broken. The first, {what}"
        ) from error
    log.warning(
        "%d of %d episodes failed; their samples are masked. The first, %s", len(failed), len(episodes), what
    )
