"""The agents of a run, built from `rollout.multi_turn` and `rollout.agent`, and their episodes.

Many episodes run at once: one coroutine each over one engine, at most `max_concurrency` at a time. An
exception of a loop, a tool or an interaction ends only its own episode: the sample is masked and counted.
When every episode fails, the loop itself counts as broken.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from strop.agents.endpoint.program import PROGRAM_AGENT, ProgramAgent
from strop.agents.endpoint.server import EndpointServer
from strop.agents.endpoint.service import ServiceAgent
from strop.agents.environments.choose import ENVIRONMENT_AGENT, environment_agent, needs_endpoint
from strop.agents.episode import Episode, EpisodeContext, EpisodeLimits
from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.parsers.base import parser_for
from strop.agents.tool_set import ToolSet
from strop.concurrency import BackgroundLoop, contained
from strop.config.policies import engine_adapters
from strop.config.schema.rollout import AgentConfig, RolloutConfig
from strop.data.chat import Chat
from strop.data.prompts import ToolListing
from strop.rollout.base import Engine, Sampling
from strop.types import Prompt

log = logging.getLogger(__name__)
CLOSING_SECONDS = 10.0
"""Seconds for interrupted episodes to release their tools."""


@dataclass
class AgentSetup:
    """The agent loops, tools and interactions of a run.

    Each is read from its file when it is first used, so a run without agents reads none.
    """

    rollout: RolloutConfig
    chat: Chat
    functions: Sequence[Callable[..., object]] = ()
    """The tools themselves, where the caller has them; their file is then not read."""

    @functools.cached_property
    def loops(self) -> AgentLoops:
        agent = self.rollout.agent
        default = agent.default_agent_loop
        if default == AgentConfig.default_agent_loop:
            if agent.command is not None:
                default = PROGRAM_AGENT
            if self.rollout.environment is not None:
                default = ENVIRONMENT_AGENT
        loops = AgentLoops.from_config(default, agent.agent_loop_config_path)
        if agent.command is not None:
            loops.add(PROGRAM_AGENT, ServiceAgent if agent.service else ProgramAgent, {"settings": agent})
        if self.rollout.environment is not None:
            chosen = {
                "environment": self.rollout.environment,
                "arguments": self.rollout.environment_kwargs,
            }
            loops.add(ENVIRONMENT_AGENT, environment_agent, chosen)
        return loops

    @functools.cached_property
    def endpoint(self) -> EndpointServer | None:
        """The endpoint for agents from outside; None where none is configured."""
        agent = self.rollout.agent
        wanted = agent.command is not None or agent.endpoint is not None
        if not wanted and not needs_endpoint(self.rollout.environment):
            return None
        return EndpointServer(
            self.rollout.multi_turn.format,
            host=agent.endpoint_host,
            max_calls=agent.max_calls,
            adapters=engine_adapters(agent),
        )

    @functools.cached_property
    def tools(self) -> ToolSet:
        settings = self.rollout.multi_turn
        return ToolSet.from_config(
            settings.tool_config_path,
            timeout=settings.call_timeout,
            max_response_length=settings.max_tool_response_length,
            truncate_side=settings.tool_response_truncate_side,
            max_parallel=settings.max_parallel_calls,
            functions=self.functions,
        )

    @functools.cached_property
    def interactions(self) -> Interactions:
        return Interactions.from_config(self.rollout.multi_turn.interaction_config_path)

    def listing(self) -> ToolListing | None:
        """Return the tools that the chat template shows, and the loops whose prompts show them; None without
        tools."""
        if self.rollout.multi_turn.tool_config_path is None:
            return None
        names = [None, *self.loops.names()]
        listing_loops = frozenset(name for name in names if self.loops.lists_tools(name))
        return ToolListing(self.tools.schemas, listing_loops)

    def runner(self, engine: Engine, *, max_model_len: int, seed: Callable[..., int]) -> EpisodeRunner:
        """Return the runner of episodes over an engine."""
        settings = self.rollout.multi_turn
        limits = EpisodeLimits(
            prompt_length=self.rollout.prompt_length,
            response_length=self.rollout.response_length,
            max_model_len=max_model_len,
            max_assistant_turns=settings.max_assistant_turns,
            max_user_turns=settings.max_user_turns,
            tool_error_policy=settings.tool_error_policy,
            call_timeout=settings.call_timeout,
        )
        parser = None
        if self.tools.schemas:
            parser = parser_for(settings.format, self.chat.tokenizer)
        context = EpisodeContext(
            engine, self.chat, limits, self.tools, parser, self.interactions, seed, self.endpoint
        )
        return EpisodeRunner(context, self.loops, max_concurrency=self.rollout.agent.max_concurrency)


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
        self._running: set[asyncio.Future[Episode]] = set()
        self._event_loop = BackgroundLoop("strop-agents")  # one for the run: connections of tools live in it

    def run(self, requests: Sequence[EpisodeRequest], *, all_may_fail: bool = False) -> list[Episode]:
        """Return all episodes, ended, in the order of `requests`."""
        try:
            episodes: list[Episode] = self._event_loop.start(self._run_all(requests)).result()
        except BaseException:  # a signal, or a row whose loop does not exist
            self._cancel_episodes()
            raise
        _report_failures(episodes, all_may_fail)
        return episodes

    def close(self) -> None:
        """Close the loops, the endpoint, and the tools and their connections."""
        with ExitStack() as stack:  # the last one first, each also if another one fails
            stack.callback(self._event_loop.close)
            stack.callback(self.context.tools.close)
            if self.context.endpoint is not None:
                stack.callback(self._finish, self.context.endpoint.close)
            stack.callback(self._finish, self.loops.close)
            stack.callback(self._cancel_episodes)

    def _finish(self, close: Callable[[], Coroutine[object, None, None]]) -> None:
        self._event_loop.run(close(), timeout=CLOSING_SECONDS)

    def _cancel_episodes(self) -> None:
        """Cancel the running episodes, and wait a while until they have released tools and interactions, and
        killed their programs."""
        try:
            self._finish(self._cancel)
        except TimeoutError:
            log.warning("Episodes did not release their tools within %g s.", CLOSING_SECONDS)

    async def _run_all(self, requests: Sequence[EpisodeRequest]) -> list[Episode]:
        semaphore = asyncio.Semaphore(self.max_concurrency)
        tasks = [asyncio.ensure_future(self._run_one(request, semaphore)) for request in requests]
        self._running.update(tasks)
        for task in tasks:
            task.add_done_callback(self._running.discard)
        return list(await asyncio.gather(*tasks))

    async def _cancel(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run_one(self, request: EpisodeRequest, semaphore: asyncio.Semaphore) -> Episode:
        loop = self.loops.get(request.prompt.agent_name)
        async with semaphore:
            episode = Episode(
                self.context, request.prompt, request.sampling, seeds=request.seeds, group=request.group
            )
            try:
                await contained(loop.run(episode))
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
