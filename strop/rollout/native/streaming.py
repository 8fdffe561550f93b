"""Streams the tokens of a sample to the callback of its request."""

from __future__ import annotations

from collections.abc import Callable

from strop.rollout.base import Request

Listener = Callable[[list[int], list[float]], None]


def listener(request: Request, index: int, on_error: Callable[[Exception], None]) -> Listener | None:
    """Calls `request.on_tokens` with new tokens of sample `index`; None: the request wants no stream."""
    on_tokens = request.on_tokens
    if on_tokens is None:
        return None

    def listen(ids: list[int], log_probs: list[float]) -> None:
        try:
            on_tokens(index, ids, log_probs)
        except Exception as error:  # noqa: BLE001 - a failing callback fails only its request
            on_error(error)

    return listen
