"""What all episodes of a run share: the engine, the template, tools, interactions, limits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from strop.agents.interaction import Interactions
from strop.agents.parsers import ToolParser
from strop.agents.rendering import Rendering
from strop.agents.toolbox import Toolbox
from strop.data.chat import Chat
from strop.rollout.base import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    prompt_length: int
    response_length: int
    """Tokens of all turns after the prompt, those of tools and users included."""
    longest: int
    """Tokens of prompt and response together that the engine can hold."""
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    tool_error_policy: str = "reply"
    """reply | stop | mask."""
    call_timeout: float = 60.0


@dataclass(frozen=True)
class World:
    engine: Engine
    chat: Chat
    limits: Limits
    toolbox: Toolbox
    """Empty where no tools are configured."""
    parser: ToolParser | None
    """How tool calls are written."""
    interactions: Interactions
    seed: Callable[..., int]
    """One seed from several numbers."""

    def texts(self, ids: list[int]) -> tuple[str, str]:
        """What ids say, with special tokens and without."""
        text = str(self.chat.tokenizer.decode(ids, skip_special_tokens=False))
        if self._special.isdisjoint(ids):
            return text, text
        return text, str(self.chat.tokenizer.decode(ids, skip_special_tokens=True))

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.chat.tokenizer.all_special_ids)

    @functools.cached_property
    def rendering(self) -> Rendering:
        """Proven when the first message is appended: runs without one need no template for it."""
        rendering = Rendering.of(self.chat, tools=self.toolbox.schemas or None)
        for notice in rendering.notices:
            log.warning("%s", notice)
        return rendering
