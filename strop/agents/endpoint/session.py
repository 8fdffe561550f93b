"""One episode behind the endpoint: its key, its limits and its calls."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from strop.agents.endpoint.calls import AnswerHead, ApiRefusal, ModelAnswer, ModelCall
from strop.agents.endpoint.processes import new_mark
from strop.agents.endpoint.recording import CallPrompt, Recording
from strop.agents.endpoint.streaming import TextFeed
from strop.agents.episode import Episode, EpisodeContext, EpisodeError
from strop.agents.parsers.base import (
    OPENING,
    Malformed,
    Parsed,
    ToolCall,
    ToolParser,
    parse_answer,
    parser_for,
)
from strop.agents.rendering import Rendering
from strop.agents.stops import AnswerEnd
from strop.agents.tool_schema import JsonObject
from strop.agents.tool_session import typed_arguments
from strop.rollout.base import Completion, Request

log = logging.getLogger(__name__)

KEY_PREFIX = "strop-"
CONTEXT_TOO_LONG = "context_length_exceeded"


@dataclass
class ToolFormat:
    """How the model writes tool calls, and how the chat template renders each list of tools."""

    name: str
    """multi_turn.format."""
    _parser: ToolParser | None = None
    _renderings: dict[str, Rendering] = field(default_factory=dict)

    def parser(self, context: EpisodeContext) -> ToolParser:
        """Return the parser of calls; ApiRefusal if the model has no format for them."""
        if self._parser is None:
            try:
                self._parser = parser_for(self.name, context.chat.tokenizer)
            except ValueError as error:
                raise ApiRefusal(400, f"This model cannot be given tools: {error}", param="tools") from error
        return self._parser

    def rendering(self, context: EpisodeContext, tools: list[JsonObject], label: str) -> Rendering:
        """Return the chat template with these tools."""
        if label not in self._renderings:
            if tools:
                self._check_listed(context, tools)
            self._renderings[label] = Rendering.of(context.chat, tools=tools or None)
            for notice in self._renderings[label].notices:
                log.warning("%s", notice)
        return self._renderings[label]

    def _check_listed(self, context: EpisodeContext, tools: list[JsonObject]) -> None:
        text = context.chat.text([{"role": "user", "content": "?"}], generate=True, tools=tools)
        for schema in tools:
            name = schema["function"]["name"]
            if name not in text:
                raise ApiRefusal(
                    400,
                    f"This model cannot be given tools: its chat template does not list {name!r}.",
                    param="tools",
                )


class EndpointSession:
    """The calls of one episode."""

    def __init__(
        self,
        episode: Episode,
        tool_format: ToolFormat,
        *,
        max_calls: int,
        player: str = "",
        place: int = 0,
        adapter: str | None = None,
    ) -> None:
        """`place`: number of the player. `adapter`: of the engine, which answers its calls."""
        self.episode = episode
        self.player = player
        self.others: list[EndpointSession] = []
        """The sessions of the second and further players, each with a key and conversations of its own."""
        self.by_model: Mapping[str, EndpointSession] = {}
        """With several policies: the sessions of the episode by the name of their policy."""
        self._place = place
        self._adapter = adapter
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.recording = Recording()
        self.failure: Exception | None = None
        """Why the episode cannot be used."""
        self.max_calls = max_calls
        self.requests = 0
        """All requests with this key, refused ones too."""
        self.flooded = asyncio.Event()
        """The agent made more requests than it may."""
        self._sampling: set[asyncio.Task[ModelAnswer]] = set()
        self._tool_format = tool_format
        self._started = 0
        """Calls that were given to the engine."""
        self._ended = False
        self.program_mark: str | None = None
        """In the environment of the episode's program (processes.py); None: calls come from anywhere."""
        self.known_ports: set[int] = set()
        """Of connections that belong to this program."""

    def mark_program(self) -> str:
        """Return the mark of the program that has the keys of this episode."""
        mark = new_mark()
        for session in (self, *self.others):
            session.program_mark = mark
        return mark

    async def answer(self, call: ModelCall, feed: TextFeed | None = None) -> ModelAnswer:
        """Sample the answer to a call and record it. `feed` gets the tokens while they are sampled."""
        episode = self.episode
        prompt = self._prompt(call)
        room = self._room(prompt, call.max_tokens)
        seeds = (*episode.seeds, self._started)
        if self._place:
            seeds = (*seeds, self._place)
        number = self._started
        self._started += 1
        seed = episode.context.seed(*seeds)
        request = Request(prompt.ids, seed=seed, max_tokens=room, adapter=self._adapter)
        head = AnswerHead(f"{self.key[-8:]}-{number}", call.model, len(prompt.ids))
        if feed is not None and feed.early:
            feed.begin(head, lambda ids: episode.context.decode(ids)[1], episode.sampling.stop_ids)
            request = replace(request, on_tokens=feed.on_tokens)
        start = time.perf_counter()
        [completion] = await episode.context.engine.agenerate(request, episode.sampling)
        episode.seconds["generate_sequences"] += time.perf_counter() - start
        if self._ended:
            raise self.after_end()
        if completion.finish in ("error", "abort") or not completion.ids:
            reason = completion.error or f"the engine ended the request ({completion.finish})"
            raise ApiRefusal(500, f"No answer was sampled: {reason}.", code="server_error")
        if self.failure is not None and _too_long(self.failure):
            self.failure = None  # the agent made its context shorter
        return self._record(call, prompt, completion, head, number)

    def answering(self, call: ModelCall) -> EndpointSession:
        """Return whose policy answers a call with this key: the one that `model` names, else that of the
        key."""
        return self.by_model.get(call.model, self)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around one request with this key: count it, and note why it was refused."""
        if self._ended:
            raise self.after_end()
        self.requests += 1
        if self.requests > self.max_calls:
            self.failure = self.failure or EpisodeError(
                f"the agent made more than rollout.agent.max_calls={self.max_calls} requests."
            )
            self.flooded.set()
            self.episode.counts["flooding_calls"] += 1
            raise ApiRefusal(429, "Too many calls in this episode.", code="rate_limit_exceeded")
        try:
            yield
        except ApiRefusal as refusal:
            self.episode.counts["refused_calls"] += 1
            if refusal.fails and (self.failure is None or _too_long(self.failure)):
                self.failure = refusal
            raise

    def start(self, call: ModelCall, feed: TextFeed | None = None) -> asyncio.Task[ModelAnswer]:
        """Start `answer` as a task, which is cancelled when the episode ends."""
        task = asyncio.ensure_future(self.answer(call, feed))
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)
        return task

    def end(self) -> None:
        """Refuse calls from now on, and cancel those that are running."""
        self._ended = True
        for task in list(self._sampling):
            task.cancel()
        for other in self.others:
            other.end()

    def after_end(self) -> ApiRefusal:
        return ApiRefusal(
            401, "The episode of this key has ended; it takes no more calls.", code="invalid_api_key"
        )

    def _prompt(self, call: ModelCall) -> CallPrompt:
        context = self.episode.context
        tools = list(call.tools)
        if tools:
            self._tool_format.parser(context)
        label = json.dumps(tools, sort_keys=True)
        try:
            rendering = self._tool_format.rendering(context, tools, label)
            return self.recording.prompt(call.messages, tools, label, rendering)
        except ValueError as error:
            raise ApiRefusal(400, str(error), param="messages") from error

    def _room(self, prompt: CallPrompt, max_tokens: int | None) -> int:
        """Return how many tokens the answer may have."""
        limits = self.episode.context.limits
        turns = limits.max_assistant_turns
        if turns is not None and self._started >= turns:
            self.episode.stopped = "max_assistant_turns"
            said = f"The episode has had its {turns} answers (multi_turn.max_assistant_turns)."
            raise ApiRefusal(429, said, code="rate_limit_exceeded", fails=False)
        spent = 0
        parent = self.recording.parent(prompt.ids)
        if parent is not None:
            first = parent
            while first.continues is not None:
                first = first.continues
            spent = len(prompt.ids) - len(first.prompt.ids)
        room = min(limits.max_model_len - len(prompt.ids), limits.response_length - spent)
        if room < 1:
            raise ApiRefusal(
                400,
                f"This model's maximum context length is {limits.max_model_len} tokens, of which an episode "
                f"may add {limits.response_length} to its prompt; the messages have {len(prompt.ids)}.",
                code=CONTEXT_TOO_LONG,
                param="messages",
            )
        if max_tokens is not None:
            room = min(room, max_tokens)
        return room

    def _record(
        self, call: ModelCall, prompt: CallPrompt, completion: Completion, head: AnswerHead, number: int
    ) -> ModelAnswer:
        context = self.episode.context
        ids = list(completion.ids)
        spoken = ids
        if ids[-1] in self.episode.sampling.stop_ids:
            spoken = ids[:-1]
        end = AnswerEnd.find(context.decode, spoken, call.stop)
        if end.stop:
            ids = spoken = spoken[: end.kept]
            completion = replace(completion, finish="stop")
        text, plain = end.cut(*context.decode(spoken))
        before, _ = context.decode(prompt.ids[-OPENING:])
        parsed = self._parse(call, before, text, plain, number)
        calls = tuple(found for found in parsed.calls if isinstance(found, ToolCall))
        decode = context.chat.tokenizer.decode
        tokens: list[str] = []
        if call.wants_log_probs:
            tokens = [str(decode([token])) for token in spoken]
        answer = ModelAnswer(
            id=head.id,
            model=head.model,
            content=parsed.content,
            calls=calls,
            finish=completion.finish,
            prompt_tokens=head.prompt_tokens,
            tokens=tokens,
            ids=ids,
            log_probs=completion.log_probs[: len(ids)],
            stop_text=end.stop,
        )
        self.recording.record(prompt, completion, len(ids), answer.message())
        self.episode.counts["calls"] += 1
        return answer

    def _parse(self, call: ModelCall, before: str, text: str, plain: str, number: int) -> Parsed:
        """Return text and tool calls of an answer. An answer with a call that cannot be read is all text."""
        if not call.tools:
            return Parsed(plain)
        parsed = parse_answer(self._tool_format.parser(self.episode.context), text, before)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in call.tools}
        calls = []
        for place, found in enumerate(parsed.calls):
            if isinstance(found, Malformed):
                return Parsed(plain)
            arguments = typed_arguments(found.arguments, schemas.get(found.name, {}))
            calls.append(ToolCall(found.name, arguments, f"call_{number}_{place}"))
        if not calls:
            return Parsed(plain)
        return Parsed(parsed.content, tuple(calls))

    def raise_failure(self) -> None:
        """Raise why the episode cannot be used, if a call was refused or none was made."""
        for session in (self, *self.others):
            if session.failure is not None:
                raise EpisodeError(f"a call of the agent was refused: {session.failure}") from session.failure
        if not self.recording.calls:
            raise EpisodeError("the agent made no call to the endpoint.")

    def set_rewards(self, score: float, turns: Sequence[float]) -> None:
        """Set the score of the episode, and the rewards of its calls in their order."""
        calls = self.recording.calls
        if len(turns) > len(calls):
            raise EpisodeError(
                f"there are rewards for {len(turns)} turns, but the agent made {len(calls)} calls."
            )
        self.episode.score = score
        for call, reward in zip(calls, turns, strict=False):
            call.reward = reward

    def keys(self) -> dict[str, str]:
        """Return the keys of all players, by name."""
        return {session.player: session.key for session in (self, *self.others)}

    def set_scores(self, scores: Mapping[str, float]) -> None:
        """Set the score of each player."""
        players = list(self.keys())
        if sorted(scores) != sorted(players):
            raise EpisodeError(
                f"there are scores of {sorted(scores)}, and the players are {sorted(players)}."
            )
        self.episode.score = scores[self.player]
        self.episode.player_scores = {name: scores[name] for name in players[1:]}

    def hand_over(self) -> None:
        """Give the recorded calls to the episode, as its conversation."""
        calls = self.recording.calls
        if not calls:
            return
        rows = []
        for session in (self, *self.others):
            rows += [(row.prompt, row.tokens(session.player)) for row in session.recording.rows()]
        self.episode.adopt(rows, [*calls[-1].prompt.messages, calls[-1].answer], calls[-1].finish)


def _too_long(failure: Exception) -> bool:
    return isinstance(failure, ApiRefusal) and failure.code == CONTEXT_TOO_LONG
