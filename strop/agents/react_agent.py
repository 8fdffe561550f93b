"""react_agent: tools in plain text, for models whose template knows none.

Thought: I need the product.
Action: calculator
Action Input: {"expression": "37*48"}
Observation: 1776                       <- told by us; an answer that goes on to write it itself is cut before it
Thought: That is it.
Final Answer: 1776
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.calls import Malformed, ToolCall
from strop.agents.episode import Episode
from strop.agents.partner import partner_of
from strop.agents.tool_agent import converse, session_of, tell_results

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
    def __init__(self, instruction: str = INSTRUCTION) -> None:
        self.instruction = instruction

    async def run(self, episode: Episode) -> None:
        schemas = episode.world.toolbox.schemas
        async with session_of(episode) as session, partner_of(episode) as partner:
            episode.open(self._instructed(episode.messages, schemas))
            while True:
                said = await episode.answer(until=OBSERVATION)
                call = action_of(said.text, schemas)
                if call is not None and session is not None:
                    going_on = episode.may_go_on() and await tell_results(episode, session, [call], as_observation)
                else:
                    going_on = partner is not None and await converse(episode, partner)
                if not going_on:
                    return

    def _instructed(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The instruction stands before the first thing the user says: every template has a place for that."""
        told = [dict(message) for message in messages]
        first = next((message for message in told if message["role"] == "user"), None)
        if first is None or not isinstance(first["content"], str):
            raise ValueError("react_agent needs a prompt with a message of the user, in text.")
        first["content"] = f"{self.instruction.replace('{tools}', described(schemas))}\n\n{first['content']}"
        return told


def described(schemas: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for schema in schemas:
        function = schema["function"]
        arguments = json.dumps(function["parameters"].get("properties", {}))
        lines.append(f"- {function['name']}: {function['description']} Arguments: {arguments}")
    return "\n".join(lines)


def action_of(text: str, schemas: Sequence[Mapping[str, Any]]) -> ToolCall | Malformed | None:
    """The tool call of an answer; None for a final answer, or one that names no action."""
    action = _ACTION.search(text)
    final = text.find(FINAL)
    if action is None or 0 <= final < action.start():
        return None
    name, given = action["name"], _INPUT.search(text, action.end())
    if given is None:
        return Malformed(action.group().strip(), "an Action is followed by a line `Action Input:` with its arguments as JSON.")
    return _arguments(name, given["input"].strip(), schemas)


def _arguments(name: str, given: str, schemas: Sequence[Mapping[str, Any]]) -> ToolCall | Malformed:
    """JSON; or, for a tool of a single argument, that argument as it stands."""
    try:
        arguments, _ = json.JSONDecoder().raw_decode(given)
    except (json.JSONDecodeError, RecursionError):
        arguments = given.partition("\n")[0].strip()
    if isinstance(arguments, dict):
        return ToolCall(name, arguments)
    parameters = [s["function"]["parameters"].get("properties", {}) for s in schemas if s["function"]["name"] == name]
    if len(parameters) == 1 and len(parameters[0]) == 1:
        return ToolCall(name, {next(iter(parameters[0])): arguments})
    return Malformed(given[:200], "Action Input must be a JSON object with the arguments by name.")


def as_observation(call: ToolCall | Malformed, text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{OBSERVATION} {text}"}
