"""Agent loops that call tools: tool_agent and react_agent.

tool_agent answers, runs the tools that were called, appends their results, and starts again. A simulated user
replies to answers without a tool call. The conversation ends when an answer calls no tool and there is no
user, when the user ends it, when the budget of tokens or turns is spent, or when `tool_error_policy` ends it
after a failed call. Other loops use the functions of this file too.

react_agent does the same in plain text, for models whose chat template has no tools:

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
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from strop.agents.episode import Episode, EpisodeError, within
from strop.agents.interaction import BaseInteraction, ChatMessage
from strop.agents.parsers.base import Malformed, ToolCall, parse_answer, read_json
from strop.agents.tool_schema import JsonObject
from strop.agents.tool_session import ToolSession
from strop.rewards.signatures import own_copy

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


class ToolAgent:
    """The loop `tool_agent`."""

    lists_tools = True

    async def run(self, episode: Episode) -> None:
        async with open_tools(episode) as tools, open_interaction(episode) as user:
            while True:
                answer = await episode.answer()
                calls: Sequence[ToolCall | Malformed] = ()
                if tools is not None:
                    calls = parse_tool_calls(episode, answer.text)
                if tools is not None and calls:
                    goes_on = episode.may_go_on() and await run_tool_calls(episode, tools, calls)
                else:
                    goes_on = user is not None and await reply_as_user(episode, user)
                if not goes_on:
                    return


MessageFormat = Callable[[ToolCall | Malformed, str], ChatMessage]
"""From a call and its result to the message that the model reads."""


@asynccontextmanager
async def open_tools(episode: Episode) -> AsyncIterator[ToolSession | None]:
    """Yield the tools of one episode, released however it ends; None where no tools are configured.

    The tools' rewards for the episode (calc_reward) are reported, and added to the score by their weight.
    """
    tools = episode.context.tools
    if not tools.schemas:
        yield None
        return
    episode.tools = tools.schemas
    session = await tools.open(own_copy(episode.prompt.extra_info.get("tools_kwargs") or {}))
    try:
        yield session
        episode.extras["tool_rewards"] = await session.rewards()
    finally:
        episode.counts.update(session.counts)
        await session.close()


def parse_tool_calls(episode: Episode, text: str) -> tuple[ToolCall | Malformed, ...]:
    """Return the tool calls of an answer, in the configured format."""
    assert episode.context.parser is not None, "there are tools, but no format of tool calls"
    before, _ = episode.context.decode(episode.before)
    return parse_answer(episode.context.parser, text, before).calls


def result_message(call: ToolCall | Malformed, text: str) -> ChatMessage:
    """Return the result of a call as a message of the role `tool`."""
    message: ChatMessage = {"role": "tool", "content": text}
    if call.name:
        message["name"] = call.name
    if isinstance(call, ToolCall) and call.id:
        message["tool_call_id"] = call.id
    return message


async def run_tool_calls(
    episode: Episode,
    tools: ToolSession,
    calls: Sequence[ToolCall | Malformed],
    message_format: MessageFormat = result_message,
) -> bool:
    """Run the calls of one answer and append their results; False when the conversation ends here."""
    results = await episode.waiting(tools.run(calls))
    for result in results:
        episode.extras.update(result.metrics)
    if reward := sum(result.reward for result in results):
        episode.reward(reward)
    policy = episode.context.limits.tool_error_policy
    failed = [result for result in results if result.failed]
    if failed and policy == "mask":
        raise EpisodeError(f"a tool call failed, and multi_turn.tool_error_policy=mask: {failed[0].text}")
    if failed and policy == "stop":
        episode.stopped = "tool_error"
        return False
    messages = []
    images: list[object] = []
    for call, result in zip(calls, results, strict=True):
        message = message_format(call, result.text)
        if result.images:
            shown = [{"type": "image"} for _ in result.images]
            message = {**message, "content": [*shown, {"type": "text", "text": message["content"]}]}
            images += result.images
        messages.append(message)
    return episode.tell(*messages, images=images)


@dataclass(frozen=True)
class InteractionSession:
    """The simulated user of one episode."""

    interaction: BaseInteraction
    instance_id: str
    kwargs: JsonObject
    """The row's interaction_kwargs."""
    timeout: float

    async def reply(self, episode: Episode) -> tuple[bool, str]:
        """Reward the latest answer and reply to it; whether the conversation ends, and what the user says."""
        work = self.interaction.generate_response(self.instance_id, own_copy(episode.messages), **self.kwargs)
        reply = await episode.waiting(within(work, self.timeout, f"the interaction {self.name}"))
        try:
            ends, text, reward, numbers = reply
        except (TypeError, ValueError) as error:
            raise EpisodeError(
                f"the interaction {self.name} returned {reply!r}; generate_response gives (should_stop, "
                "text, reward, numbers)."
            ) from error
        episode.reward(float(reward))
        episode.extras.update(numbers or {})
        episode.counts["interactions"] += 1
        return bool(ends), str(text)

    @property
    def name(self) -> str:
        return str(getattr(self.interaction, "name", type(self.interaction).__name__))


@asynccontextmanager
async def open_interaction(episode: Episode) -> AsyncIterator[InteractionSession | None]:
    """Yield the simulated user that the row names, finalized however the episode ends; None for rows
    without."""
    kwargs = dict(own_copy(episode.prompt.extra_info.get("interaction_kwargs") or {}))
    interaction = episode.context.interactions.choose(kwargs)
    if interaction is None:
        yield None
        return
    kwargs.pop("name", None)
    timeout = episode.context.limits.call_timeout
    new_id = uuid.uuid4().hex
    start = interaction.start_interaction(new_id, **kwargs)
    instance_id = await within(start, timeout, "start_interaction") or new_id
    try:
        yield InteractionSession(interaction, instance_id, kwargs, timeout)
        if hasattr(interaction, "calculate_score"):
            work = interaction.calculate_score(instance_id, **kwargs)
            episode.extras["interaction_score"] = float(await within(work, timeout, "calculate_score"))
    finally:
        if hasattr(interaction, "finalize_interaction"):
            end = interaction.finalize_interaction(instance_id, **kwargs)
            await within(end, timeout, "finalize_interaction")


async def reply_as_user(episode: Episode, user: InteractionSession) -> bool:
    """Let the user reward the answer, also the last one, and reply where another turn is allowed; False when
    the conversation ends here."""
    ends, text = await user.reply(episode)
    if ends:
        episode.stopped = episode.stopped or "interaction"
        return False
    return episode.may_go_on() and episode.tell({"role": "user", "content": text})


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
        arguments, _ = read_json(given)
    except ValueError:
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
