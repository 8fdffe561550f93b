"""Read and check the requests of the reward server: nothing that a client sends is its error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from strop.data.chat import lone_surrogate

if TYPE_CHECKING:
    from fastapi import Request

MEGABYTE = 1 << 20
DRAIN_FACTOR = 8  # a body of up to this many times the limit is read, so that the client receives the error
MAX_SHOWN = 200


class RequestRefused(Exception):
    """A request that is answered with an HTTP error status and a message."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


def printable(text: str) -> str:
    """Text of a client for an error message: not too long, and valid UTF-8."""
    return text[:MAX_SHOWN].encode("utf-8", "backslashreplace").decode()


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request; one over the limit is never held in memory."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > DRAIN_FACTOR * limit:
            break
    if size <= limit:
        return b"".join(chunks)
    shown = f"{size / MEGABYTE:.1f} MB"
    if size > DRAIN_FACTOR * limit:
        shown = f"more than {DRAIN_FACTOR * limit / MEGABYTE:g} MB"
    raise RequestRefused(
        413, f"The request has {shown}, the limit is {limit / MEGABYTE:g} MB. Send fewer texts at a time."
    )


def parse_queries(body: bytes, max_texts: int) -> list[str]:
    """Return the texts of a request; RequestRefused if it has none or too many."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"The body is not JSON: {printable(str(error))}") from error
    if not isinstance(content, dict):
        raise RequestRefused(422, 'Expected {"query": [text, ...]}, got no object.')
    if "query" not in content:
        keys = printable(", ".join(sorted(content))) or "nothing"
        raise RequestRefused(422, f'Expected {{"query": [text, ...]}}, got an object with {keys}.')
    texts = content["query"]
    if not isinstance(texts, list):
        raise RequestRefused(422, f"query must be a list of texts, it is {type(texts).__name__}.")
    for index, text in enumerate(texts):
        if text == "":
            raise RequestRefused(422, f"query[{index}] is empty; it must be text.")
        if not isinstance(text, str):
            raise RequestRefused(422, f"query[{index}] is {type(text).__name__}; it must be text.")
        problem = lone_surrogate(text)
        if problem is not None:
            raise RequestRefused(422, f"query[{index}] holds {problem}.")
    if len(texts) > max_texts:
        raise RequestRefused(
            413,
            f"{len(texts)} texts in one request; the queue holds {max_texts}. Send fewer texts at a time.",
        )
    return texts
