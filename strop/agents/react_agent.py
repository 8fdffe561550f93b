"""react_agent: tool calls in plain text, for models whose chat template knows no tools.

Thought: I need the product.
Action: calculator
Action Input: {"expression": "37*48"}
Observation: 1776            <- appended by the loop; an answer that invents it itself is cut before it
Thought: That is it.
Final Answer: 1776
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from strop.agents.episode import Episode
from strop.agents.interaction import ChatMessage
from strop.agents.parsers.base import Malformed, ToolCall
from strop.agents.tool_agent import open_interaction, open_tools, reply_as_user, run_tool_calls
from strop.agents.tool_schema import JsonObject

OBSERVATION = "Observation:"
FINAL = "Final Answer:"
INSTRUCTION = """You may use these tools:
{tools}

Write in this form:
Thought: what you think
Action: the name of one tool
Action Input: its arguments as JSON
and stop there; you are then told an Observation, and go on with a Thought. When you know the answer, write:
Final Answer: the answer"""
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*(?P<name>.*?)[ \t]*$", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*Action Input:[ \t]*(?P<input>.*)\Z", re.MULTILINE | re.DOTALL)


class ReactAgent:
    """The loop `react_agent`."""

    def __init__(self, instruction: str = INSTRUCTION) -> None:
        self.instruction = instruction

    async def run(self, episode: Episode) -> None:
        schemas = episode.context.tools.schemas
        async with open_tools(episode) as tools, open_interaction(episode) as user:
            episode.open(self._with_instruction(episode.messages, schemas))
            while True:
                answer = await episode.answer(until=OBSERVATION)
                call = action_of(answer.text, schemas)
                if call is not None and tools is not None:
                    goes_on = episode.may_go_on() and await run_tool_calls(
                        episode, tools, [call], as_observation
                    )
                else:
                    goes_on = user is not None and await reply_as_user(episode, user)
                if not goes_on:
                    return

    def _with_instruction(
        self, messages: Sequence[ChatMessage], schemas: Sequence[JsonObject]
    ) -> list[ChatMessage]:
        """Put the instruction before the first message of the user: every template has a place for that."""
        copies = [dict(message) for message in messages]
        first = next((message for message in copies if message["role"] == "user"), None)
        if first is None or not isinstance(first["content"], str):
            raise ValueError("react_agent needs a prompt with a message of the user, in text.")
        instruction = self.instruction.replace("{tools}", describe_tools(schemas))
        first["content"] = f"{instruction}\n\n{first['content']}"
        return copies


def describe_tools(schemas: Sequence[JsonObject]) -> str:
    """Return a line about each tool."""
    lines = []
    for schema in schemas:
        function = schema["function"]
        arguments = json.dumps(function["parameters"].get("properties", {}))
        lines.append(f"- {function['name']}: {function['description']} Arguments: {arguments}")
    return "\n".join(lines)


def action_of(text: str, schemas: Sequence[JsonObject]) -> ToolCall | Malformed | None:
    """Return the tool call of an answer; None for a final answer, or one that names no action."""
    action = _ACTION.search(text)
    final = text.find(FINAL)
    if action is None or 0 <= final < action.start():
        return None
    given = _INPUT.search(text, action.end())
    if given is None:
        return Malformed(
            action.group().strip(),
            "an Action is followed by a line `Action Input:` with its arguments as JSON.",
        )
    return _call_of(action["name"], given["input"].strip(), schemas)


def _call_of(name: str, given: str, schemas: Sequence[JsonObject]) -> ToolCall | Malformed:
    """Read the input as JSON; for a tool with a single parameter, also as that argument alone."""
    try:
        arguments, _ = json.JSONDecoder().raw_decode(given)
    except (json.JSONDecodeError, RecursionError):
        arguments = given.partition("\n")[0].strip()
    if isinstance(arguments, dict):
        return ToolCall(name, arguments)
    for schema in schemas:
        function = schema["function"]
        parameters = list(function["parameters"].get("properties", {}))
        if function["name"] == name and len(parameters) == 1:
            return ToolCall(name, {parameters[0]: arguments})
    return Malformed(given[:200], "Action Input must be a JSON object with the arguments by name.")


def as_observation(call: ToolCall | Malformed, text: str) -> ChatMessage:
    """Return the result of a call as an Observation."""
    return {"role": "user", "content": f"{OBSERVATION} {text}"}
