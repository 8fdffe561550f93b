"""One conversation, token by token.

    answer = await episode.answer()                  # the policy samples; its ids are kept as sampled, mask 1
    episode.tell({"role": "tool", "content": "4"})   # the environment adds messages; mask 0
    episode.reward(0.5)                              # for the answer before, on its last token

A loop calls these in any order. The episode keeps ids, mask, log-probs and turns aligned, and has one budget:
`data.max_response_length` tokens over all turns.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from strop.agents.interaction import ChatMessage, Interactions
from strop.agents.parsers.base import OPENING, ToolParser
from strop.agents.rendering import Rendering
from strop.agents.rows import TokenRow
from strop.agents.stops import AnswerEnd
from strop.agents.tool_schema import JsonObject
from strop.agents.tool_set import ToolSet
from strop.data.chat import Chat, Message
from strop.data.images import PreparedImage
from strop.rollout.base import (
    Completion,
    Engine,
    Request,
    Sampling,
    truncate_spans,
    version_spans,
)
from strop.types import Images, Prompt, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode."""

    prompt_length: int
    response_length: int
    """Tokens of all turns after the prompt, also of tools and users."""
    max_model_len: int
    """Tokens of prompt and response together that the engine can hold."""
    max_assistant_turns: int | None
    max_user_turns: int | None
    tool_error_policy: str
    """reply | stop | mask."""
    call_timeout: float
    """Seconds for one call of a tool or an interaction."""


class EpisodeKey(Protocol):
    """The access of one episode to the endpoint."""

    key: str

    def raise_failure(self) -> None:
        """Raise why the episode cannot be used, if a call of it was refused."""
        ...


class EpisodeEndpoint(Protocol):
    """The HTTP endpoint of a run (endpoint/server.py)."""

    @property
    def address(self) -> str:
        """The URL without a path; OpenAI's API is at /v1."""
        ...

    def session(
        self, episode: Episode, players: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[EpisodeKey]:
        """Answer calls with a key of the episode, or of each of its players, until the context ends. What was
        called is then the conversation of the episode."""
        ...

    def when_closing(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close()` before the endpoint closes."""
        ...

    async def close(self) -> None: ...


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
    endpoint: EpisodeEndpoint | None = None
    """Where agents from outside reach the policy; None where none is configured."""

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


@dataclass(frozen=True)
class AssistantMessage:
    """An answer of the policy."""

    text: str
    """With special tokens, which some formats of tool calls use; without the stop token."""
    finish: str
    """stop | length | abort."""


class EpisodeError(ValueError):
    """Why an episode cannot go on. Its sample is masked and counted; other episodes go on."""


T = TypeVar("T")


class Episode:
    """A conversation that a loop drives, and the sample that it becomes."""

    def __init__(
        self,
        context: EpisodeContext,
        prompt: Prompt,
        sampling: Sampling,
        *,
        seeds: Sequence[int],
        group: int = 0,
    ) -> None:
        """Answer number t uses the random stream of `seeds` and t, independent of the rest of the batch."""
        self.context = context
        self.prompt = prompt
        self.sampling = sampling
        self.group = group
        self.messages: list[ChatMessage] = [dict(message) for message in prompt.messages]
        """The conversation so far, as interactions read it."""
        self.tools: Sequence[JsonObject] | None = None
        """Schemas that the template lists in the prompt."""
        self.score: float | None = None
        """A loop may set the score of the whole conversation; then no scorer is called."""
        self.player_scores: dict[str, float] = {}
        """Scores of the second and further players, in episodes that have several."""
        self.extras: dict[str, Any] = {}
        """Values for dumps, validation metrics and the scorer."""
        self.counts: Counter[str] = Counter()
        """Events, for the metrics of the step."""
        self.seconds = {"generate_sequences": 0.0, "tool_calls": 0.0}
        self.stopped = ""
        """Why the conversation ended, if the loop did not simply finish."""
        self.error: Exception | None = None
        self.seeds = tuple(seeds)
        self.images: Images = prompt.images
        """Of the prompt, and those that tools returned."""
        self.before: list[int] = []
        """The last ids before the latest answer."""
        self._row = TokenRow()
        self._branches: list[tuple[list[int], TokenRow]] = []
        """Prompt and response of further sequences of the episode, whose agent rewrote its context."""
        self._finish = "stop"

    # --- what a loop may read -------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Tokens left of the budget."""
        limits = self.context.limits
        whole = min(limits.response_length, limits.max_model_len - len(self.prompt.ids))
        return whole - len(self)

    def __len__(self) -> int:
        """Tokens after the prompt."""
        return len(self._row.response)

    @property
    def assistant_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self._row.turns)

    @property
    def user_turns(self) -> int:
        """Turns of tools and users together."""
        return len(self._row.turns) - self.assistant_turns

    def may_go_on(self) -> bool:
        """Return whether another turn is allowed; if not, `stopped` says why."""
        limits = self.context.limits
        if self.stopped:
            return False
        if self.room < 1:
            self._finish = self.stopped = "length"
        elif limits.max_assistant_turns is not None and self.assistant_turns >= limits.max_assistant_turns:
            self.stopped = "max_assistant_turns"
        elif limits.max_user_turns is not None and self.user_turns >= limits.max_user_turns:
            self.stopped = "max_user_turns"
        return not self.stopped

    # --- what a loop may do ---------------------------------------------------------------------------------

    def open(self, messages: Sequence[Message], *, tools: Sequence[JsonObject] | None = None) -> None:
        """Replace the prompt of the row, for loops that explain themselves to the model."""
        assert not self._row.turns, "a prompt cannot change after the first answer"
        if self.prompt.images:
            raise EpisodeError("the agent loop writes its own prompt, and the row has images; take another.")
        ids = self.context.chat.ids(messages, tools=tools)
        if len(ids) > self.context.limits.prompt_length:
            raise EpisodeError(
                f"with what the agent loop adds, the prompt has {len(ids)} tokens, over "
                f"data.max_prompt_length={self.context.limits.prompt_length}. Raise it, or drop the row."
            )
        self.messages = [dict(message) for message in messages]
        self.tools = tools
        self.prompt = replace(self.prompt, ids=ids, messages=self.messages)

    async def answer(self, *, until: str | None = None, max_tokens: int | None = None) -> AssistantMessage:
        """Sample an answer of the policy. An answer that contains the text `until` is cut before it; a last
        token that holds the beginning of `until` stays in the ids."""
        if self._finish != "stop" or self.room < 1:
            raise EpisodeError(
                f"no room for another answer: {len(self)} tokens are spent; ask may_go_on() first."
            )
        completion = await self._sample(max_tokens)
        ids = list(completion.ids)
        if not ids:
            raise EpisodeError(f"an answer without a single token (finish={completion.finish}).")
        spoken = ids
        if ids[-1] in self.sampling.stop_ids:
            spoken = ids[:-1]
        end = AnswerEnd.find(self.context.decode, spoken, [until] if until else [])
        if end.stop:
            ids = spoken = spoken[: end.kept]
        spans = truncate_spans(version_spans(completion), len(ids))
        experts = completion.experts
        if experts is not None:
            experts = experts[: len(self.prompt.ids) + len(self) + len(ids)]
        self._row.add_sampled(ids, completion.log_probs[: len(ids)], spans, experts)
        finish = "stop" if end.stop else completion.finish
        if finish != "stop" and not (finish == "length" and self.room > 0):
            self._finish = self.stopped = finish
        text, content = end.cut(*self.context.decode(spoken))
        self.messages.append({"role": "assistant", "content": content})
        return AssistantMessage(text, finish)

    async def _sample(self, max_tokens: int | None) -> Completion:
        """Return one completion of the conversation so far."""
        room = self.room
        if max_tokens is not None:
            room = min(room, max_tokens)
        seed = self.context.seed(*self.seeds, self.assistant_turns)
        ids = [*self.prompt.ids, *self._row.response]
        self.before = ids[-OPENING:]
        request = Request(ids, seed=seed, max_tokens=room, images=self.images)
        start = time.perf_counter()
        [completion] = await self.context.engine.agenerate(request, self.sampling)
        self.seconds["generate_sequences"] += time.perf_counter() - start
        if completion.finish == "error":
            raise EpisodeError(f"the engine refused: {completion.error}.")
        return completion

    def tell(self, *messages: Message, images: Sequence[object] = ()) -> bool:
        """Append messages of tools or a user and the header of the next answer; False, with nothing appended,
        when they do not fit. `images`: those of the {"type": "image"} parts of the messages, in order."""
        assert self._row.turns and self._row.turns[-1].role == "assistant", (
            "the policy speaks first, and after each tell()"
        )
        prepared = self._prepare(images)
        ids = self.context.rendering.after(
            self.messages[:-1],
            messages,
            last_id=self._row.response[-1],
            tools=self.tools,
            images=[one.text for one in prepared],
        )
        if len(ids) >= self.room:
            self._finish = self.stopped = "length"
            return False
        self.images += tuple(one.inputs for one in prepared)
        self._row.add_given(str(messages[0]["role"]), ids)
        self.messages += [dict(message) for message in messages]
        return True

    def _prepare(self, images: Sequence[object]) -> list[PreparedImage]:
        if not images:
            return []
        if self.context.chat.images is None:
            raise EpisodeError("a tool returned images, and the model takes none.")
        token = self.context.chat.images.token_id
        own = sum(image.num_tokens for image in self.images if not image.video)
        if [*self.prompt.ids, *self._row.response].count(token) != own:  # images take the first such tokens
            raise EpisodeError(
                "an image token that belongs to no image was sampled or written as text, so images of a tool "
                "cannot follow."
            )
        return self.context.chat.images.prepare(images, where="the images of a tool")

    def reward(self, amount: float) -> None:
        """Reward the latest answer; the reward is on its last sampled token."""
        if not math.isfinite(amount):
            raise EpisodeError(
                f"a reward of {amount} for turn {self.assistant_turns} is not a number to learn from."
            )
        place = max(turn.end for turn in self._row.turns if turn.role == "assistant") - 1
        self._row.rewards[place] = self._row.rewards.get(place, 0.0) + float(amount)

    async def waiting(self, work: Awaitable[T]) -> T:
        """Await something of the environment; its time counts as tool time."""
        start = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds["tool_calls"] += time.perf_counter() - start

    # --- the sample -----------------------------------------------------------------------------------------

    def trajectory(self) -> Trajectory:
        """Return the sample to train on; a failed episode has finish=error."""
        failed = self.error is not None
        extras = dict(self.extras)
        if self.stopped:
            extras["stopped"] = self.stopped
        shown = self.prompt
        if self.images is not shown.images:
            shown = replace(shown, images=self.images)
        sample = self._row.trajectory(
            shown,
            self.group,
            finish="error" if failed else self._finish,
            score=None if failed else self.score,
            extras=extras,
        )
        for ids, row in self._branches:
            prompt = replace(self.prompt, ids=ids)
            score = None if failed else self.player_scores.get(row.player)
            sample.branches.append(row.trajectory(prompt, self.group, finish=sample.finish, score=score))
        return sample

    def adopt(
        self, rows: Sequence[tuple[list[int], TokenRow]], messages: Sequence[Message], finish: str
    ) -> None:
        """Take what an agent from outside did as the conversation: sequences of prompt and response, of which
        the first is scored, and the messages of that one."""
        (prompt, self._row), *self._branches = rows
        self.prompt = replace(self.prompt, ids=prompt)
        self.messages = [dict(message) for message in messages]
        self.counts["branches"] += len(self._branches)
        self._finish = finish


async def within(work: Awaitable[T], seconds: float, what: str) -> T:
    """Await `work`; after `seconds` it is an EpisodeError that names `what`."""
    try:
        async with asyncio.timeout(seconds):  # in the task that also closes connections
            return await work
    except TimeoutError as error:
        raise EpisodeError(
            f"{what} did not answer within {seconds:g} seconds (multi_turn.call_timeout)."
        ) from error
