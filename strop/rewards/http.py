"""POST JSON to a server, with retries until a deadline."""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

MAX_TRIES = 5
PAUSE = 1.0  # seconds between tries
RETRYABLE_STATUS = (408, 425, 429)


class RequestTooLarge(ConnectionError):
    """The server refused the size of the request (HTTP 413)."""


def post_json(
    next_url: Callable[[], str],
    content: object,
    *,
    what: str,
    timeout: float,
    headers: Mapping[str, str] | None = None,
    tries: int = MAX_TRIES,
    pause: float = PAUSE,
    on_retry: Callable[[], None] = lambda: None,
) -> tuple[object, str]:
    """Return the parsed reply, and the URL that it came from; each try goes to `next_url()`.

    If no try succeeds within `timeout` seconds: TimeoutError or ConnectionError, which name the server as
    `what`. RequestTooLarge is raised at once.
    """
    body = json.dumps(content, default=str).encode()
    deadline = time.monotonic() + timeout
    for attempt in itertools.count(1):
        url = next_url()
        try:
            return _post(url, body, headers or {}, deadline), url
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            wait = max(pause, _retry_after(error))
            if attempt == tries or not _is_retryable(error) or time.monotonic() + wait >= deadline:
                raise _explained(error, what, url, attempt) from error
        on_retry()
        time.sleep(wait)
    raise AssertionError("unreachable")


def _post(url: str, body: bytes, headers: Mapping[str, str], deadline: float) -> object:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json", **headers}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as reply:
        content: object = json.loads(reply.read())
    return content


def _is_retryable(error: Exception) -> bool:
    """Whether the same request may succeed later; not if the server understood and refused it."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in RETRYABLE_STATUS
    return True


def _retry_after(error: Exception) -> float:
    """Return the seconds that a busy server asks to wait, or 0."""
    if isinstance(error, urllib.error.HTTPError):
        seconds = error.headers.get("Retry-After", "")
        if seconds.isdigit():
            return float(seconds)
    return 0.0


def _explained(error: Exception, what: str, url: str, attempts: int) -> Exception:
    tries = f"{attempts} tries"
    if attempts == 1:
        tries = "1 try"
    message = f"The {what} {url} gave no usable answer after {tries}: {type(error).__name__}: {error}"
    cause: object = error
    if isinstance(error, urllib.error.URLError):
        cause = error.reason
    if isinstance(error, urllib.error.HTTPError):
        message += f". It said: {error.read(200).decode(errors='replace')}"
        if error.code == http.client.REQUEST_ENTITY_TOO_LARGE:
            return RequestTooLarge(message)
    if isinstance(cause, TimeoutError):
        return TimeoutError(message)
    return ConnectionError(message)
