"""An agent written with the OpenAI Agents SDK: it may use a calculator. Nothing in it is made for training.

With a task as its argument it solves that task. Without one it is a service: it reads tasks as lines of JSON
and solves many at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MAX_TURNS = 3
HTTP = DefaultAsyncHttpxClient()
"""One pool of connections for all episodes: to make a client takes longer than an episode."""


@function_tool
def calculator(expression: str) -> str:
    """Compute a product such as 12*34."""
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


AGENT = Agent(name="calculator", tools=[calculator], model="policy")


async def solve(task: str, base_url: str, api_key: str) -> str:
    """Return what the agent answers in the end."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    settings = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    result = await Runner.run(AGENT, task, max_turns=MAX_TURNS, run_config=settings)
    return str(result.final_output)


async def play(episode: dict[str, Any]) -> None:
    """Solve the task of an episode and report that it is over."""
    answer: dict[str, Any] = {"id": episode["id"]}
    try:
        answer["answer"] = await solve(episode["task"], episode["base_url"], episode["api_key"])
    except Exception as error:  # noqa: BLE001 - a failed episode must not end the others
        answer["error"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def serve() -> None:
    """Play the episodes that come in until the input ends."""
    lines = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        task = asyncio.ensure_future(play(json.loads(line)))
        playing.add(task)
        task.add_done_callback(playing.discard)
    await asyncio.gather(*playing)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        found = asyncio.run(solve(sys.argv[1], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
        sys.stdout.write(f"{found}\n")
    else:
        asyncio.run(serve())
