"""How messages of tools and users become ids behind what was sampled.

Sampled ids are never made into text and back. What the environment says is rendered alone and appended. Whether the whole is
then exactly what the chat template would have written for the conversation is proven once, with a trial conversation: such a
template is *stable*, and later turns are rendered with the true history before them. A template that rewrites earlier turns
(as some do with thoughts) is rendered without it, and a notice says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.data.chat import Chat, Message

RESULT = "RESULTxOFxTHExTOOL"
TRIAL: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "<think>\nI look it up.\n</think>\n\nOne moment."},
    {"role": "tool", "content": RESULT, "name": "calculator", "tool_call_id": "call_0"},
    {"role": "assistant", "content": "<think>\nThat was easy.\n</think>\n\nIt is 5."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "That makes 6."},
    {"role": "user", "content": "Good."},
)


@dataclass(frozen=True)
class Rendering:
    """A chat template as agents use it."""

    chat: Chat
    stable: bool
    """A conversation that grew turn by turn is what the template writes for the whole."""
    tool_role: str = "tool"
    """Who results of tools come from: templates that know no tools are told that a user says them."""
    notices: tuple[str, ...] = ()

    @classmethod
    def of(cls, chat: Chat, *, tools: Sequence[Mapping[str, Any]] | None = None) -> Rendering:
        """Try the template; a ValueError if conversations of several turns cannot be had from it at all."""
        notices: list[str] = []
        role = "tool"
        if tools and not _shows_results(chat, tools):
            role = "user"
            notices.append("The chat template has no place for results of tools; they are given as what the user says.")
        trial = [{**m, "role": role} if m["role"] == "tool" else m for m in TRIAL if tools or m["role"] != "tool"]
        if not tools:
            trial = [m for m in trial if m["content"] != TRIAL[1]["content"]]
        grown, whole = _grown(chat, trial, tools), chat.text(trial, generate=True, tools=tools)
        if grown == whole:
            return cls(chat, True, role, tuple(notices))
        rendering = cls(chat, False, role)
        for place, message in enumerate(trial):
            if place and message["role"] != "assistant":
                rendering.after(trial[: place - 1], [message], last_id=None, tools=tools)
        same = next((i for i, (a, b) in enumerate(zip(grown, whole)) if a != b), min(len(grown), len(whole)))
        notices.append(
            "The chat template writes a whole conversation differently from its turns one by one "
            f"({whole[same : same + 40]!r} where the turns gave {grown[same : same + 40]!r}). Turns stay as they were sampled, "
            "and new messages are rendered without the history before them."
        )
        return cls(chat, False, role, tuple(notices))

    def after(
        self,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        last_id: int | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of `messages` behind an answer that ended with `last_id`; `history` is everything before that answer."""
        told = [{**m, "role": self.tool_role} if m["role"] == "tool" else m for m in messages]
        if self.stable:
            return self.chat.later_turn(told, last_id=last_id, history=history, tools=tools)
        return self.chat.later_turn(told, last_id=last_id)


def _shows_results(chat: Chat, tools: Sequence[Mapping[str, Any]]) -> bool:
    try:
        return RESULT in chat.text(TRIAL[:3], tools=tools)
    except ValueError:
        return False


def _grown(chat: Chat, trial: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The trial conversation as an episode writes it: each turn behind the last."""
    text = chat.text(trial[:1], generate=True, tools=tools)
    for place, message in enumerate(trial):
        if message["role"] == "assistant":
            text += str(message["content"])
        elif place:
            text += chat.later_text([message], history=trial[: place - 1], tools=tools)
    return text
