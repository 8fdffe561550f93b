"""From the columns of a row to a conversation as token ids, or `UnusableRow` with what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from strop.data.chat import Chat, Rendered, Tools
from strop.data.files import Row
from strop.data.schema import Message, as_messages, split_placeholders, tool_schemas


class UnusableRow(ValueError):
    """A row that cannot be trained on."""


def parse_messages(value: object, where: str, input_template: str | None = None) -> list[Message]:
    try:
        return as_messages(value, where=where, input_template=input_template)
    except ValueError as error:
        raise UnusableRow(str(error)) from error


def row_tools(row: Row, column: str, where: str) -> Tools | None:
    """Return the schemas of the tools that a row has."""
    try:
        return tool_schemas(row.get(column), where=f"{where}, column {column!r}")
    except ValueError as error:
        raise UnusableRow(
            f"{error} If this column is about something else, set data.tools_key (of SFT "
            "data.multiturn.tools_key) to another name."
        ) from error


def answer_messages(value: object, prompt: Sequence[Message], where: str) -> list[Message]:
    """Return the answer to a prompt as messages; text is one assistant turn."""
    if value is None or value == "" or value == []:
        raise UnusableRow(f"{where} is empty.")
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    answer = parse_messages(value, where)
    role = answer[0]["role"]
    if prompt[-1]["role"] == "user" and role in ("user", "system"):
        raise ValueError(
            f"{where} begins with {role!r} after the user's turn that ends the prompt: it holds a whole "
            "conversation, in which the prompt would stand twice. For pairs set data.prompt_key=null; for "
            "SFT set data.multiturn.enable=true, and data.multiturn.messages_key to this column."
        )
    return answer


def render_conversation(
    chat: Chat, messages: Sequence[Message], learn_from: int, where: str, *, tools: Tools | None = None
) -> Rendered:
    """Render a conversation that begins with the user, after an optional system message."""
    roles = [message["role"] for message in messages]
    turns = [role for role in roles if role != "system"]
    if turns and turns[0] != "user":
        raise UnusableRow(
            f"{where}: the conversation begins with {turns[0]!r}, but it must begin with 'user' "
            f"({', '.join(roles)})."
        )
    for turn, message in enumerate(messages):
        says_nothing = not any(value for name, value in message.items() if name != "role")
        if turn >= learn_from and message["role"] == "assistant" and says_nothing:
            raise UnusableRow(f"{where}: message {turn}, of the assistant, is empty.")
    try:
        counts = {"image": len(chat.expansions), "video": len(chat.video_expansions)}
        messages = split_placeholders(list(messages), counts, where=where)
        return chat.conversation(messages, learn_from=learn_from, tools=tools)
    except ValueError as error:
        raise UnusableRow(f"{where}: {error}") from error
