"""Episodes without a model: an engine that says what a script tells it, and a character tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import decoders

from strop.agents.episode import Episode, EpisodeContext, EpisodeLimits
from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.parsers.base import parser_for
from strop.agents.runner import EpisodeRequest, EpisodeRunner
from strop.agents.tool_session import CallLimits
from strop.agents.tool_set import ToolSet
from strop.agents.tools import tool_from_function
from strop.data.chat import Chat
from strop.rollout.base import Completion, Request, Sampling, stream_seed
from strop.types import Prompt
from tests.data.tokens import CHATML, character_tokenizer


def tokenizer_of(template: str = CHATML) -> Any:
    made = character_tokenizer(template=template)
    made.backend_tokenizer.decoder = decoders.Fuse()
    return made


TOKENIZER = tokenizer_of()
STOP = TOKENIZER.eos_token_id
SAMPLING = Sampling(max_tokens=400, stop_ids=(STOP,))
Script = Callable[[str, int], str]
"""(the whole conversation in text, tokens after the prompt of the row) -> the next answer; it is ended by a stop token."""


class ScriptedEngine:
    """Answers as told, cut at max_tokens; keeps every request."""

    version = 7

    def __init__(
        self, script: Script | Sequence[str], tokenizer: Any = TOKENIZER, latency: float = 0.0
    ) -> None:
        self.script, self.tokenizer, self.latency = script, tokenizer, latency
        self.requests: list[Request] = []
        self.completions: list[Completion] = []

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(self.latency)
        number = len(self.requests)
        self.requests.append(request)
        said = (
            self.script(self.tokenizer.decode(request.ids), number)
            if callable(self.script)
            else self.script[min(number, len(self.script) - 1)]
        )
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), STOP]
        assert request.max_tokens is not None
        finish = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        completion = Completion(ids, [-0.5 - place / 1000 for place in range(len(ids))], finish, self.version)
        self.completions.append(completion)
        return [completion]


def tool_set(
    *functions: Callable[..., Any], parallel: int = 4, timeout: float = 60.0, max_response_length: int = 256
) -> ToolSet:
    return ToolSet(
        [tool_from_function(f) for f in functions],
        CallLimits(timeout, max_response_length, "middle", parallel),
    )


def episode_context(
    engine: Any,
    *,
    tools: ToolSet | None = None,
    interactions: Interactions | None = None,
    tokenizer: Any = TOKENIZER,
    **limits: Any,
) -> EpisodeContext:
    settings: dict[str, Any] = {
        "prompt_length": 2000,
        "response_length": 400,
        "max_model_len": 4000,
        "max_assistant_turns": None,
        "max_user_turns": None,
        "tool_error_policy": "reply",
        "call_timeout": 60.0,
        **limits,
    }
    return EpisodeContext(
        engine,
        Chat(tokenizer),
        EpisodeLimits(**settings),
        tools or tool_set(),
        parser_for("hermes", tokenizer),
        interactions or Interactions(),
        stream_seed,
    )


def prompt(
    question: str = "2+2?",
    index: int = 0,
    agent: str | None = "tool_agent",
    scene: EpisodeContext | None = None,
    **extra: Any,
) -> Prompt:
    messages = [{"role": "user", "content": question}]
    tools = scene.tools.schemas or None if scene is not None else None
    ids = Chat(TOKENIZER).ids(messages, tools=tools)
    return Prompt(index, ids, messages, "test", extra_info=extra, agent_name=agent)


def play(
    scene: EpisodeContext, *rows: Prompt, loops: AgentLoops | None = None, at_once: int = 1024
) -> list[Episode]:
    """Run an episode for each row."""
    runner = EpisodeRunner(scene, loops or AgentLoops("single_turn_agent"), max_concurrency=at_once)
    try:
        return runner.run(
            [EpisodeRequest(row, SAMPLING, (1, row.index), place) for place, row in enumerate(rows)]
        )
    finally:
        runner.close()


def text(ids: Sequence[int]) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(list(ids)))
