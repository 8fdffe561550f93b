"""From the sections `rollout.multi_turn` and `rollout.agent` to what runs episodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strop.agents.interaction import Interactions
from strop.agents.loops import Loops
from strop.agents.parsers import parser_for
from strop.agents.runner import EpisodeRunner
from strop.agents.toolbox import Toolbox
from strop.agents.world import Limits, World
from strop.data.chat import Chat
from strop.data.prompts import ToolListing
from strop.rollout.base import Engine


@dataclass
class Cast:
    """Who may take part in the episodes of a run. Read from files when somebody asks; a run without agents never does."""

    rollout: Any
    """The section `actor_rollout_ref.rollout`."""
    chat: Chat

    @functools.cached_property
    def loops(self) -> Loops:
        agent = self.rollout.agent
        return Loops.from_config(agent.default_agent_loop, agent.agent_loop_config_path)

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        settings = self.rollout.multi_turn
        return Toolbox.from_config(
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
        """The tools that the chat template shows, and to whom; None where none are configured."""
        if self.rollout.multi_turn.tool_config_path is None:
            return None
        names = [None, *self.loops.names()]
        return ToolListing(self.toolbox.schemas, frozenset(name for name in names if self.loops.lists_tools(name)))

    def runner(self, engine: Engine, *, longest: int, seed: Callable[..., int]) -> EpisodeRunner:
        settings = self.rollout.multi_turn
        limits = Limits(
            prompt_length=self.rollout.prompt_length,
            response_length=self.rollout.response_length,
            longest=longest,
            max_assistant_turns=settings.max_assistant_turns,
            max_user_turns=settings.max_user_turns,
            tool_error_policy=settings.tool_error_policy,
            call_timeout=settings.call_timeout,
        )
        parser = parser_for(settings.format, self.chat.tokenizer) if self.toolbox.schemas else None
        world = World(engine, self.chat, limits, self.toolbox, parser, self.interactions, seed)
        return EpisodeRunner(world, self.loops, max_concurrency=self.rollout.agent.max_concurrency)
