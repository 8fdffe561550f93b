"""Many episodes at once over one engine, with tools that take their time: does the wall clock follow the
longest episode?

    python benchmarks/agents.py --episodes 1000

Each episode answers, calls a tool that sleeps 0.2 to 2 s, reads the result, and so on, three times. Alone, an
episode takes at least the sum of its naps; all together they should take little more than the longest of
them. One JSON line per system: a stand-in engine that answers after 20 ms, and the native engine with a tiny
model, whose sampling is real work; each with tools that are coroutines and tools that block a thread.

    python benchmarks/agents.py --episodes 1000 --quick

A function that returns at once, beside an engine that steps as one on a GPU does: each step is ten short
pieces of Python, after which the interpreter lock is given away, and 3 ms without it. How much longer than
the steps alone does it take?
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from strop.agents.episode import Episode, EpisodeContext, EpisodeLimits
from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.parsers.base import ToolCall
from strop.agents.runner import EpisodeRequest, EpisodeRunner
from strop.agents.tool_agent import open_tools, run_tool_calls
from strop.agents.tool_session import CallLimits
from strop.agents.tool_set import ToolSet
from strop.agents.tools import tool_from_function
from strop.data.chat import Chat
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from strop.rollout.base import Completion, Request, Sampling, stream_seed
from strop.rollout.native.async_driver import AsyncDriver
from strop.rollout.native.requests import RequestState
from strop.types import Prompt

CALLS, ANSWER = 3, 4
SHORTEST, LONGEST = 0.2, 2.0


async def nap(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "1"


def blocking_nap(seconds: float) -> str:
    """Sleep, and hold a thread meanwhile."""
    time.sleep(seconds)
    return "1"


class StandIn:
    """Answers after 20 ms, any number at once."""

    version = 0

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(0.02)
        return [Completion([5] * ANSWER, [-1.0] * ANSWER, "length")]

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def quick(number: int) -> str:
    """Add one."""
    return str(number + 1)


class Stepping:
    """Stands in for the native engine: every request takes some of its steps, any number at once."""

    version = 0

    def __init__(self) -> None:
        self.steps = 0
        self._driver = AsyncDriver(self, short_calls=True)
        self._left: list[tuple[int, RequestState]] = []
        self._number = 0

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        return await self._driver.generate(request, sampling)

    @property
    def idle(self) -> bool:
        return not self._left

    def borrowed_model(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(
        self,
        request: Request,
        sampling: Sampling,
        on_done: Callable[[RequestState], None] | None = None,
        *,
        multi_turn: bool = False,
    ) -> RequestState:
        self._number += 1
        state = RequestState(self._number, request, on_done)
        self._left.append((20 + 7 * self._number % 40, state))
        return state

    def step(self) -> None:
        self.compute()
        self.steps += 1
        left = [(steps - 1, state) for steps, state in self._left]
        self._left = [(steps, state) for steps, state in left if steps]
        for steps, state in left:
            if not steps:
                state.add(0, Completion([5] * ANSWER, [-1.0] * ANSWER, "length"))

    def compute(self) -> None:
        for _ in range(10):
            sum(range(2000))
            time.sleep(0)
        time.sleep(0.003)

    def cancel(self, state: RequestState) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._driver.close()


async def calling(episode: Episode) -> None:
    """The function is called whatever the model says."""
    async with open_tools(episode) as session:
        assert session is not None
        for number in range(CALLS):
            await episode.answer(max_tokens=ANSWER)
            await run_tool_calls(episode, session, [ToolCall("quick", {"number": number})])
        await episode.answer(max_tokens=ANSWER)


def measured_quick(episodes: int, at_once: int) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    engine = Stepping()
    runner = runner_of(engine, tokenizer, quick, calling, at_once)
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    prompts = prompts_of(tokenizer, episodes)
    walls = []
    gc.collect()
    gc.freeze()  # as training loops on a GPU do
    for _ in range(5):
        engine.steps = 0
        begun = time.perf_counter()
        ended = runner.run([EpisodeRequest(prompt, sampling, (0, prompt.index)) for prompt in prompts])
        walls.append(time.perf_counter() - begun)
        assert not any(episode.error for episode in ended)
    begun = time.perf_counter()
    for _ in range(engine.steps):
        engine.compute()
    alone = time.perf_counter() - begun
    runner.close()
    engine.close()
    return {
        "system": "stepping engine, a function that returns at once",
        "episodes": episodes,
        "wall_s": round(statistics.median(walls), 2),
        "min": round(min(walls), 2),
        "max": round(max(walls), 2),
        "steps_of_the_last": engine.steps,
        "steps_alone_s": round(alone, 2),
    }


def naps_of(index: int) -> list[float]:
    chance = random.Random(index)
    return [chance.uniform(SHORTEST, LONGEST) for _ in range(CALLS)]


async def napping(episode: Episode) -> None:
    """What the model says does not matter here; the tool is called all the same."""
    [name] = episode.context.tools.tools
    async with open_tools(episode) as session:
        assert session is not None
        for seconds in naps_of(episode.prompt.index):
            await episode.answer(max_tokens=ANSWER)
            await run_tool_calls(episode, session, [ToolCall(name, {"seconds": seconds})])
        await episode.answer(max_tokens=ANSWER)


def runner_of(engine: Any, tokenizer: Any, tool: Any, loop: Any, at_once: int) -> EpisodeRunner:
    tools = ToolSet([tool_from_function(tool)], CallLimits(30.0, 64, "middle", 1))
    limits = EpisodeLimits(
        prompt_length=16,
        response_length=200,
        max_model_len=256,
        max_assistant_turns=None,
        max_user_turns=None,
        tool_error_policy="reply",
        call_timeout=60.0,
    )
    context = EpisodeContext(engine, Chat(tokenizer), limits, tools, None, Interactions(), stream_seed)
    return EpisodeRunner(context, AgentLoops("loop", {"loop": (loop, {})}), max_concurrency=at_once)


def prompts_of(tokenizer: Any, episodes: int) -> list[Prompt]:
    messages = [{"role": "user", "content": "1+1="}]
    return [Prompt(i, tokenizer.encode("1+1="), messages, "loop") for i in range(episodes)]


def measured(system: str, tool: Any, episodes: int, at_once: int) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    engine: Any = StandIn()
    if system == "native":
        from strop.rollout.base import build_engine

        engine = build_engine(
            "native", tiny_model(tokenizer, hidden=64, max_model_len=256), max_model_len=256
        )
    runner = runner_of(engine, tokenizer, tool, napping, at_once)
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    prompts = prompts_of(tokenizer, episodes)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    ended = runner.run([EpisodeRequest(prompt, sampling, (0, prompt.index)) for prompt in prompts])
    wall = time.perf_counter() - begun
    stats = engine.stats()
    runner.close()
    engine.close()
    assert not any(episode.error for episode in ended)
    naps = [sum(naps_of(i)) for i in range(episodes)]
    busy = (
        {"engine_busy": round(stats["seconds"] / wall, 3), "engine_seconds": round(stats["seconds"], 2)}
        if stats
        else {}
    )
    return {
        "system": f"{system}, {'threads' if tool is blocking_nap else 'coroutines'}",
        "episodes": episodes,
        "in_flight": min(at_once, episodes),
        "wall_s": round(wall, 2),
        "longest_episode_alone_s": round(max(naps), 2),
        "wall_over_longest": round(wall / max(naps), 3),
        "one_after_the_other_s": round(sum(naps)),
        "memory_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024),
        **busy,
        **{
            f"rollout/{name}": round(stats[name], 3)
            for name in ("occupancy", "tokens_per_second")
            if name in stats
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=1024, help="rollout.agent.max_concurrency")
    parser.add_argument("--out", help="also write the lines to this file")
    parser.add_argument("--quick", action="store_true", help="a function that returns at once")
    asked = parser.parse_args()
    lines = []
    if asked.quick:
        sys.stdout.write(json.dumps(measured_quick(asked.episodes, asked.at_once)) + "\n")
        return
    for system in ("stand-in", "native"):
        for tool in (nap, blocking_nap):
            lines.append(json.dumps(measured(system, tool, asked.episodes, asked.at_once)))
            sys.stdout.write(lines[-1] + "\n")
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
