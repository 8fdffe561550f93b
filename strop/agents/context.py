"""What all episodes of a run share: engine, chat template, tools, interactions, limits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from strop.agents.interaction import Interactions
from strop.agents.parsers.base import ToolParser
from strop.agents.rendering import Rendering
from strop.agents.tool_set import ToolSet
from strop.data.chat import Chat
from strop.rollout.base import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode."""

    prompt_length: int
    response_length: int
    """Tokens of all turns after the prompt, also of tools and users."""
    max_model_len: int
    """Tokens of prompt and response together that the engine can hold."""
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    tool_error_policy: str = "reply"
    """reply | stop | mask."""
    call_timeout: float = 60.0
    """Seconds for one call of a tool or an interaction."""


@dataclass(frozen=True)
class EpisodeContext:
    """What an episode uses and does not own."""

    engine: Engine
    chat: Chat
    limits: EpisodeLimits
    tools: ToolSet
    """Empty where no tools are configured."""
    parser: ToolParser | None
    """The format of tool calls."""
    interactions: Interactions
    seed: Callable[..., int]
    """One seed from several numbers."""

    def decode(self, ids: list[int]) -> tuple[str, str]:
        """Return the text of ids, with special tokens and without."""
        text = str(self.chat.tokenizer.decode(ids, skip_special_tokens=False))
        if self._special_ids.isdisjoint(ids):
            return text, text
        return text, str(self.chat.tokenizer.decode(ids, skip_special_tokens=True))

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.chat.tokenizer.all_special_ids)

    @functools.cached_property
    def rendering(self) -> Rendering:
        """The chat template for later turns. It is checked at the first such turn, since single-turn runs
        never need it."""
        rendering = Rendering.of(self.chat, tools=self.tools.schemas or None)
        for notice in rendering.notices:
            log.warning("%s", notice)
        return rendering
