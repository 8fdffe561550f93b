"""The calls of one episode as tokens: a tree of conversations.

A call whose messages continue an earlier conversation gets its prompt from the recorded ids: the tokens of
that conversation, the answer as it was sampled, and then the new messages, which are rendered once. Where an
agent rewrites its context (a summary, dropped tool results, a sub-agent), the new conversation is rendered by
the chat template; every answer in it that was sampled here is put in by its recorded ids. So text that the
policy wrote is never tokenized again.

`rows` divides the calls into sequences to train on. A call that continues another one by tokens is appended
to its row. The second continuation of a call, or a call that continues none, starts a row of its own. Each
sampled token is trained in exactly one row, and is part of the prompt in others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strop.agents.endpoint.calls import MessageKey, message_key
from strop.agents.interaction import ChatMessage
from strop.agents.rendering import Rendering
from strop.agents.rows import TokenRow
from strop.agents.tool_schema import JsonObject
from strop.rollout.base import Completion, truncate_spans, version_spans

if TYPE_CHECKING:
    import numpy as np

_PLACE = re.compile(r"RECORDEDx(\d+)xANSWER")


@dataclass(frozen=True)
class CallPrompt:
    """The prompt of a call in tokens."""

    ids: list[int]
    keys: tuple[MessageKey, ...]
    """Of the messages."""
    messages: list[ChatMessage]
    tools: str
    """The schemas as text, to compare."""
    role: str
    """Of the first message that is new: tool, user ..."""


@dataclass(eq=False)
class RecordedCall:
    """A call and its answer."""

    number: int
    prompt: CallPrompt
    answer: ChatMessage
    ids: list[int]
    log_probs: list[float]
    versions: list[tuple[int, int]]
    finish: str
    key: MessageKey = ()
    """Of the answer."""
    sequence: list[int] = field(default_factory=list)
    """Prompt and answer."""
    continues: RecordedCall | None = None
    """The call whose row it extends."""
    extended: bool = False
    reward: float = 0.0
    """Of this answer alone."""
    experts: np.ndarray | None = None
    """Of prompt and answer, where the engine records them: see Trajectory."""

    def __post_init__(self) -> None:
        self.key = message_key(self.answer)
        self.sequence = [*self.prompt.ids, *self.ids]


@dataclass
class RecordedRow:
    """Calls that continue each other: one sequence to train on."""

    calls: list[RecordedCall]

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first answer of this row."""
        return self.calls[0].prompt.ids

    def tokens(self, player: str = "") -> TokenRow:
        """Return what follows the prompt."""
        row = TokenRow(player=player)
        for call in self.calls:
            between = call.prompt.ids[len(self.prompt) + len(row.response) :]
            if between:
                row.add_given(call.prompt.role, between)
            experts = call.experts
            if experts is not None:
                experts = experts[: len(call.sequence)]
            row.add_sampled(call.ids, call.log_probs, call.versions, experts)
            if call.reward:
                row.rewards[len(row.response) - 1] = call.reward
        return row


class Recording:
    """All calls of one episode."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self._by_conversation: dict[tuple[str, tuple[MessageKey, ...]], RecordedCall] = {}
        """The latest call by its tools and messages, answer included."""
        self._by_answer: dict[MessageKey, RecordedCall] = {}
        """The latest call with this answer."""

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], label: str, rendering: Rendering
    ) -> CallPrompt:
        """Return the tokens of a conversation; `label` stands for the tools."""
        keys = tuple(message_key(message) for message in messages)
        base = self._base(label, keys)
        known = 0
        if base is not None:
            known = len(base.prompt.keys) + 1
        new = list(messages[known:])
        ids = self._render(base, new, keys[known:], list(tools), rendering)
        role = "user"
        for message in new:
            if message["role"] != "assistant":
                role = str(message["role"])
                break
        return CallPrompt(ids, keys, list(messages), label, role)

    def record(
        self, prompt: CallPrompt, completion: Completion, kept: int, answer: ChatMessage
    ) -> RecordedCall:
        """Keep the first `kept` tokens of a completion as the answer to `prompt`."""
        call = RecordedCall(
            number=len(self.calls),
            prompt=prompt,
            answer=answer,
            ids=list(completion.ids[:kept]),
            log_probs=list(completion.log_probs[:kept]),
            versions=truncate_spans(version_spans(completion), kept),
            finish=completion.finish,
            experts=completion.experts,
        )
        call.continues = self.parent(prompt.ids)
        if call.continues is not None:
            call.continues.extended = True
        self.calls.append(call)
        self._by_conversation[prompt.tools, (*prompt.keys, call.key)] = call
        self._by_answer[call.key] = call
        return call

    def parent(self, ids: Sequence[int]) -> RecordedCall | None:
        """Return the call whose tokens, answer included, are the longest known beginning of `ids`; None where
        it has a continuation already."""
        found: RecordedCall | None = None
        for call in self.calls:
            size = len(call.sequence)
            longest = 0 if found is None else len(found.sequence)
            if longest < size <= len(ids) and ids[size - 1] == call.ids[-1] and ids[:size] == call.sequence:
                found = call
        if found is None or found.extended:
            return None
        return found

    def rows(self) -> list[RecordedRow]:
        """Return the sequences to train on; the one with the latest answer comes first."""
        chains: dict[int, list[RecordedCall]] = {}
        for call in self.calls:
            chain = [call]
            if call.continues is not None:
                chain = [*chains.pop(call.continues.number), call]
            chains[call.number] = chain
        return [RecordedRow(chains[number]) for number in sorted(chains, reverse=True)]

    def _base(self, label: str, keys: tuple[MessageKey, ...]) -> RecordedCall | None:
        """Return the longest recorded conversation that these messages continue."""
        for known in range(len(keys) - 1, 0, -1):
            if keys[known - 1][0] == "assistant" and (label, keys[:known]) in self._by_conversation:
                return self._by_conversation[label, keys[:known]]
        return None

    def _render(
        self,
        base: RecordedCall | None,
        new: Sequence[ChatMessage],
        keys: Sequence[MessageKey],
        tools: list[JsonObject],
        rendering: Rendering,
    ) -> list[int]:
        """Return the tokens of `base` and of the messages after it."""
        chat = rendering.chat
        marked: list[ChatMessage] = []
        answers: dict[str, RecordedCall] = {}
        for place, (message, key) in enumerate(zip(new, keys, strict=True)):
            if key not in self._by_answer:
                marked.append(message)
                continue
            answers[str(place)] = self._by_answer[key]
            marked.append({"role": "assistant", "content": f"RECORDEDx{place}xANSWER"})
        if base is None:
            text = chat.text(rendering.renamed(marked), generate=True, tools=tools or None)
        else:
            text = rendering.text_after(base.prompt.messages, marked, tools=tools or None)
        pieces = _PLACE.split(text)  # text, number, text, number ... text
        if pieces[1::2] != list(answers):
            raise ValueError(
                "The chat template leaves out or moves what the assistant said, so the recorded answers "
                "cannot be put in their places."
            )
        if base is None:
            ids = chat.encode(pieces[0], start=True)
        else:
            ids = [*base.sequence, *chat.ids_after(pieces[0], base.ids[-1])]
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            answer = answers[number].ids
            ids += [*answer, *chat.ids_after(piece, answer[-1])]
        return ids
