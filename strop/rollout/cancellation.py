"""Cancelled coroutines whose work in another thread uses the trainer's module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def result_when_free(work: asyncio.Future[T], stop: Callable[[], None] = lambda: None) -> T:
    """The result of `work`, which runs in another thread.

    A caller that is cancelled calls `stop`, and is resumed when the work has ended: the gradients of a
    trainer that took the module before would be wrong.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at: asyncio would report it when the future is deleted
        raise
