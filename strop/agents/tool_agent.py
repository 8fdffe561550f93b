"""tool_agent: answer, run the tools that were called, tell their results, and again. A simulated user replies to other answers.

It ends when an answer calls no tool and nobody replies, when the interaction says so, when the budget of tokens or turns is
spent, or where `tool_error_policy` says that a failed call is the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from strop.agents.calls import Malformed, ToolCall
from strop.agents.episode import Episode, EpisodeError
from strop.agents.partner import Partner, partner_of
from strop.agents.session import Session


class ToolAgent:
    lists_tools = True

    async def run(self, episode: Episode) -> None:
        async with session_of(episode) as session, partner_of(episode) as partner:
            while True:
                said = await episode.answer()
                calls = parsed(episode, said.text) if session is not None else ()
                if session is not None and calls:
                    going_on = episode.may_go_on() and await tell_results(episode, session, calls)
                else:
                    going_on = partner is not None and await converse(episode, partner)
                if not going_on:
                    return


def parsed(episode: Episode, text: str) -> tuple[ToolCall | Malformed, ...]:
    assert episode.world.parser is not None, "there are tools, but nobody knows how they are called"
    return episode.world.parser.parse(text).calls


@asynccontextmanager
async def session_of(episode: Episode) -> AsyncIterator[Session | None]:
    """The tools of one episode, released however it ends; None where no tools are configured.

    What the tools say at the end (calc_reward) is reported, and added to the score by its weight.
    """
    toolbox = episode.world.toolbox
    if not toolbox.schemas:
        yield None
        return
    episode.tools = toolbox.schemas
    session = await toolbox.open(episode.prompt.extra_info.get("tools_kwargs") or {})
    try:
        yield session
        episode.extras["tool_rewards"] = await session.rewards()
    finally:
        episode.counts.update(session.counts)
        await session.close()


Message = Callable[[ToolCall | Malformed, str], dict[str, Any]]


def result_message(call: ToolCall | Malformed, text: str) -> dict[str, Any]:
    if isinstance(call, Malformed):
        return {"role": "tool", "content": text}
    return {"role": "tool", "content": text, "name": call.name, **({"tool_call_id": call.id} if call.id else {})}


async def tell_results(
    episode: Episode, session: Session, calls: Sequence[ToolCall | Malformed], message: Message = result_message
) -> bool:
    """Run the calls of one answer and tell the model what came of them; False when the conversation ends here."""
    results = await episode.waiting(session.run(calls))
    for result in results:
        episode.extras.update(result.metrics)
    if amount := sum(result.reward for result in results):
        episode.reward(amount)
    policy = episode.world.limits.tool_error_policy
    failed = [result for result in results if result.failed]
    if failed and policy == "mask":
        raise EpisodeError(f"a tool call failed, and multi_turn.tool_error_policy=mask: {failed[0].text}")
    if failed and policy == "stop":
        episode.stopped = "tool_error"
        return False
    return episode.tell(*(message(call, result.text) for call, result in zip(calls, results, strict=True)))


async def converse(episode: Episode, partner: Partner) -> bool:
    """Let the partner judge the answer, also the last one, and reply where another round is allowed."""
    ends, text = await partner.reply(episode)
    if ends:
        episode.stopped = episode.stopped or "interaction"
        return False
    return episode.may_go_on() and episode.tell({"role": "user", "content": text})
