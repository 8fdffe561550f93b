"""Messages of tools and users as token ids after what was sampled.

Sampled ids are never decoded and encoded again. A new message is rendered by itself and appended. A probe
conversation checks once whether the result is exactly what the chat template writes for the whole
conversation. If it is, the template is *stable*, and later turns are rendered with the true history before
them. A template that rewrites earlier turns (some remove thoughts) is rendered without history, and a warning
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strop.agents.interaction import ChatMessage
from strop.agents.tool_schema import JsonObject
from strop.data.chat import Chat, Message

PROBE_RESULT = "RESULTxOFxTHExTOOL"
PROBE: tuple[ChatMessage, ...] = (
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "<think>\nI look it up.\n</think>\n\nOne moment."},
    {"role": "tool", "content": PROBE_RESULT, "name": "calculator", "tool_call_id": "call_0"},
    {"role": "assistant", "content": "<think>\nThat was easy.\n</think>\n\nIt is 5."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "That makes 6."},
    {"role": "user", "content": "Good."},
)
Schemas = Sequence[JsonObject]
SHOWN = 40
"""Characters that the warning shows of two texts that differ."""


@dataclass(frozen=True)
class Rendering:
    """A chat template as episodes use it."""

    chat: Chat
    stable: bool
    """A conversation that grew turn by turn is what the template writes for the whole."""
    tool_role: str = "tool"
    """The role of tool results: `user` for templates that know no tools, or not without the call."""
    notices: tuple[str, ...] = ()
    after_call: bool = False
    """The template writes a result only behind its call, whose name it repeats (gpt-oss)."""

    @classmethod
    def of(cls, chat: Chat, *, tools: Schemas | None = None) -> Rendering:
        """Check the template with the probe; ValueError if it cannot write several turns at all."""
        notices: list[str] = []
        role = "tool"
        if tools and not _shows_results(chat, PROBE[:3], tools):
            role = "user"
            if _shows_results(chat, [*_calling(PROBE[2:3]), PROBE[2]], tools):
                behind = (
                    "The chat template writes a result of a tool only behind its call. Turns stay as they "
                    "were sampled, and new messages are rendered without the history before them."
                )
                return cls(chat, False, role, (behind,), after_call=True)
            notices.append(
                "The chat template has no place for results of tools; they are given as what the user says."
            )
        probe = _probe_conversation(role, with_tools=bool(tools))
        grown = _render_turn_by_turn(chat, probe, tools)
        whole = chat.text(probe, generate=True, tools=tools)
        if grown == whole:
            return cls(chat, True, role, tuple(notices))
        rendering = cls(chat, False, role)
        for place, message in enumerate(probe):  # raises ValueError when a turn cannot be written at all
            if place and message["role"] != "assistant":
                rendering.after(probe[: place - 1], [message], last_id=None, tools=tools)
        same = _common_prefix(grown, whole)
        notices.append(
            "The chat template writes a whole conversation differently from its turns one by one "
            f"({whole[same : same + SHOWN]!r} where the turns gave {grown[same : same + SHOWN]!r}). Turns "
            "stay as they were sampled, and new messages are rendered without the history before them."
        )
        return cls(chat, False, role, tuple(notices))

    def after(
        self,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        last_id: int | None,
        tools: Schemas | None = None,
        images: Sequence[str] = (),
    ) -> list[int]:
        """Return the ids of `messages` after an answer that ended with `last_id`; `history` is everything
        before that answer. `images`: the text of each image in `messages`."""
        text = self.text_after(history, messages, tools=tools)
        if images:
            text = replace(self.chat, expansions=tuple(images)).expanded(text)
        return self.chat.ids_after(text, last_id)

    def text_after(
        self, history: Sequence[Message], messages: Sequence[Message], *, tools: Schemas | None = None
    ) -> str:
        """Return the text of `messages` after an answer, from the end of its turn on."""
        if self.after_call and all(message["role"] == "tool" and message.get("name") for message in messages):
            return self._results_text(messages)
        renamed = self.renamed(messages)
        if self.stable:
            return self.chat.later_text(renamed, history=history, tools=tools)
        return self.chat.later_text(renamed)

    def _results_text(self, messages: Sequence[Message]) -> str:
        """Return the end of the calls, their results, and the next generation prompt."""
        calls = self.chat.text(_calling(messages))
        groups = [messages]
        if not all(message["name"] in calls for message in messages):
            groups = [[message] for message in messages]  # gpt-oss writes the first of several calls
        pieces: list[str] = []
        for group in groups:
            before = _calling(group)
            opened = self.chat.text(before)
            whole = self.chat.text([*before, *group], generate=group is groups[-1])
            if not whole.startswith(opened):
                raise ValueError(
                    "The chat template rewrites calls when their results are added, so the results cannot be "
                    f"appended: it wrote ...{opened[-SHOWN:]!r} before."
                )
            if not pieces:
                pieces.append(opened.rpartition("{}")[2])
            pieces.append(whole.removeprefix(opened))
        return "".join(pieces)

    def renamed(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the role that the template has for tool results."""
        return [_with_role(message, self.tool_role) for message in messages]


def _with_role(message: Message, tool_role: str) -> Message:
    """Return the message with the role that the template has for tool results."""
    if message["role"] != "tool":
        return message
    return {**message, "role": tool_role}


def _probe_conversation(tool_role: str, *, with_tools: bool) -> list[Message]:
    """Return the probe; without tools it lacks the tool result and the answer that leads to it."""
    if with_tools:
        return [_with_role(message, tool_role) for message in PROBE]
    return [PROBE[0], *PROBE[3:]]


def _calling(results: Sequence[Message]) -> list[Message]:
    """Return a conversation that ends with the calls of these results, without arguments."""
    calls = []
    for result in results:
        function = {"name": result["name"], "arguments": {}}
        calls.append({"type": "function", "id": result.get("tool_call_id", "call_0"), "function": function})
    return [PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}]


def _shows_results(chat: Chat, probe: Sequence[Message], tools: Schemas) -> bool:
    try:
        return PROBE_RESULT in chat.text(probe, tools=tools)
    except ValueError:
        return False


def _render_turn_by_turn(chat: Chat, probe: Sequence[Message], tools: Schemas | None) -> str:
    """Return the probe as an episode writes it: each turn after the one before."""
    text = chat.text(probe[:1], generate=True, tools=tools)
    for place, message in enumerate(probe):
        if message["role"] == "assistant":
            text += str(message["content"])
        elif place:
            text += chat.later_text([message], history=probe[: place - 1], tools=tools)
    return text


def _common_prefix(one: str, other: str) -> int:
    """Return how many characters are the same at the beginning."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
