"""Samples many requests until enough of them are finished, and cuts the others short.

The requests that were cut short return what they have, with finish=abort, and can be continued later
(`continuation` in `base`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from strop.rollout.base import Completion, Engine, Request, Sampling

ABORT_RETRY_SECONDS = 0.02
"""Between two calls of abort: a request that had not begun at the first call must end too."""

Enough = Callable[[int], bool]
"""Called with the index of each request that has finished, in this order; True: abort the others."""


def generate_until(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, enough: Enough, *, calls_back: bool
) -> list[list[Completion]]:
    """The completions of all requests, in their order.

    `calls_back`: the engine calls `Request.on_done` between two steps. Then the same requests are always cut
    at the same tokens. Other engines run on while the abort is under way.
    """
    if not requests:
        return []
    if not calls_back:
        return asyncio.run(_agenerate_until(engine, requests, sampling, enough))
    aborted = False

    def on_done(index: int) -> None:
        nonlocal aborted
        if not aborted and enough(index):
            aborted = True
            engine.abort()

    watched = []
    for index, request in enumerate(requests):
        watched.append(replace(request, on_done=_calls(on_done, index)))
    return engine.generate(watched, sampling)


def _calls(function: Callable[[int], None], index: int) -> Callable[[], None]:
    return lambda: function(index)


async def _agenerate_until(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, enough: Enough
) -> list[list[Completion]]:
    tasks = [asyncio.ensure_future(engine.agenerate(request, sampling)) for request in requests]
    pending = set(tasks)
    aborted = False
    while pending:
        if aborted:
            engine.abort()
        wait = ABORT_RETRY_SECONDS if aborted else None
        done, pending = await asyncio.wait(pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        for index, task in enumerate(tasks):
            if task in done and not aborted:
                task.result()  # raises the error of a failed request
                aborted = enough(index)
    return [task.result() for task in tasks]
