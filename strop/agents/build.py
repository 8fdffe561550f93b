"""From the sections `rollout.multi_turn` and `rollout.agent` to the runner of episodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from strop.agents.context import EpisodeContext, EpisodeLimits
from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.parsers.base import parser_for
from strop.agents.runner import EpisodeRunner
from strop.agents.tool_set import ToolSet
from strop.config.schema.rollout import RolloutConfig
from strop.data.chat import Chat
from strop.data.prompts import ToolListing
from strop.rollout.base import Engine


@dataclass
class AgentSetup:
    """The agent loops, tools and interactions of a run.

    Each is read from its file when it is first used, so a run without agents reads none.
    """

    rollout: RolloutConfig
    chat: Chat

    @functools.cached_property
    def loops(self) -> AgentLoops:
        agent = self.rollout.agent
        return AgentLoops.from_config(agent.default_agent_loop, agent.agent_loop_config_path)

    @functools.cached_property
    def tools(self) -> ToolSet:
        settings = self.rollout.multi_turn
        return ToolSet.from_config(
            settings.tool_config_path,
            timeout=settings.call_timeout,
            max_response_length=settings.max_tool_response_length,
            truncate_side=settings.tool_response_truncate_side,
            max_parallel=settings.max_parallel_calls,
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
        context = EpisodeContext(engine, self.chat, limits, self.tools, parser, self.interactions, seed)
        return EpisodeRunner(context, self.loops, max_concurrency=self.rollout.agent.max_concurrency)
