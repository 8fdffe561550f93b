"""Many programs at once behind the recording endpoint: what does a call cost, and is one lost?

    python benchmarks/endpoint.py --episodes 1000

Another process plays all agents over HTTP, with a connection each: four chat completions per episode, each of
which continues the one before. The engine is a stand-in that answers after 20 ms, so what is measured is the
endpoint: HTTP, rendering, recording. One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from typing import Any

from strop.agents.endpoint.server import EndpointServer
from strop.agents.episode import Episode, EpisodeContext, EpisodeLimits
from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.runner import EpisodeRequest, EpisodeRunner
from strop.agents.tool_session import CallLimits
from strop.agents.tool_set import ToolSet
from strop.data.chat import Chat
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.rollout.base import Completion, Request, Sampling, stream_seed
from strop.types import Prompt

CALLS = 4
ANSWER = 32
LATENCY = 0.02
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<answer>{{ m.content }}{{ eos_token }}"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
CLIENT = """
import asyncio, json, sys
async def agent(host, port, key, calls):
    reader, writer = await asyncio.open_connection(host, port)
    messages = [{"role": "user", "content": "1+1="}]
    for _ in range(calls):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer {key}\\r\\n"
            f"Content-Length: {len(body)}\\r\\n\\r\\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\\r\\n\\r\\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\\r\\n")[0])
        message = json.loads(await reader.readexactly(length))["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "2+3="}]
    writer.close()
    print(key, flush=True)
async def main():
    host, port, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running = set()
    while line := await lines.readline():
        running.add(asyncio.ensure_future(agent(host, port, line.decode().strip(), calls)))
    await asyncio.gather(*running)
asyncio.run(main())
"""


class StandIn:
    """Answers after 20 ms, any number at once, with digits that depend on the request."""

    version = 3

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(LATENCY)
        assert request.seed is not None
        ids = [3 + (request.seed >> place) % 10 for place in range(ANSWER)]
        return [Completion([*ids, 1], [-1.0] * (ANSWER + 1), "stop", self.version)]


def measured(episodes: int) -> dict[str, Any]:
    tokenizer = tiny_tokenizer(("<answer>", "<user>"), TEMPLATE)
    server = EndpointServer("hermes", host="127.0.0.1", max_calls=CALLS)
    limits = EpisodeLimits(
        prompt_length=64,
        response_length=1000,
        max_model_len=1024,
        max_assistant_turns=None,
        max_user_turns=None,
        tool_error_policy="reply",
        call_timeout=60.0,
    )
    tools = ToolSet([], CallLimits(30.0, 64, "middle", 1))
    engine: Any = StandIn()
    chat = Chat(tokenizer)
    context = EpisodeContext(engine, chat, limits, tools, None, Interactions(), stream_seed, server)
    waiting: dict[str, asyncio.Event] = {}
    client: list[asyncio.subprocess.Process] = []
    starting = asyncio.Lock()

    async def clients() -> asyncio.subprocess.Process:
        async with starting:
            if not client:
                where = server.address.removeprefix("http://").split(":")
                pipe = subprocess.PIPE
                words = (sys.executable, "-c", CLIENT, *where, str(CALLS))
                client.append(await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe))
                background.append(asyncio.ensure_future(listen(client[0])))
                server.when_closing(stop_clients)
        return client[0]

    background: list[asyncio.Future[None]] = []

    async def stop_clients() -> None:
        client[0].kill()
        await asyncio.gather(*background, client[0].wait())

    async def listen(process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            waiting[line.decode().strip()].set()

    async def outside(episode: Episode) -> None:
        async with server.session(episode) as session:
            process = await clients()
            assert process.stdin is not None
            ended = waiting.setdefault(session.key, asyncio.Event())
            process.stdin.write(f"{session.key}\n".encode())
            await ended.wait()
            session.raise_failure()

    loops = AgentLoops("outside", {"outside": (outside, {})})
    runner = EpisodeRunner(context, loops, max_concurrency=episodes)
    messages = [{"role": "user", "content": "1+1="}]
    requests = []
    for index in range(episodes):
        prompt = Prompt(index, [], messages, "bench")
        requests.append(EpisodeRequest(prompt, Sampling(max_tokens=100, stop_ids=(1,)), (0, index)))
    cpu = time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    ended = runner.run(requests)
    wall = time.perf_counter() - begun
    cpu = time.process_time() - cpu
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    lost = 0
    for episode in ended:
        sample = episode.trajectory()
        whole = sample.branches == [] and sum(sample.mask) == CALLS * (ANSWER + 1)
        lost += episode.error is not None or not whole or episode.assistant_turns != CALLS
    runner.close()
    calls = episodes * CALLS
    return {
        "episodes_at_once": episodes,
        "calls": calls,
        "lost_episodes": lost,
        "wall_s": round(wall, 2),
        "latency_of_the_stand_in_s": CALLS * LATENCY,
        "calls_per_second": round(calls / wall),
        "cpu_ms_per_call_in_the_trainer": round(1000 * cpu / calls, 2),
        "memory_mb": round(grown / 1024),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    sys.stdout.write(json.dumps(measured(parser.parse_args().episodes)) + "\n")
