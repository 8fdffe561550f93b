"""Ask a server over HTTP with JSON, again where it may help, until the time is up."""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

TRIES = 5
PAUSE = 1.0  # seconds between them


class TooLarge(ConnectionError):
    """The server takes no request of this size."""


def post_json(
    next_url: Callable[[], str],
    content: Any,
    *,
    what: str,
    timeout: float,
    headers: Mapping[str, str] | None = None,
    tries: int = TRIES,
    pause: float = PAUSE,
    on_retry: Callable[[], None] = lambda: None,
) -> tuple[Any, str]:
    """The reply, and the address it came from; each try goes to `next_url()`.

    TimeoutError or ConnectionError, which name the server as `what`, when no try succeeds within `timeout` seconds; TooLarge
    at once when the server says so.
    """
    body = json.dumps(content, default=str).encode()
    deadline = time.monotonic() + timeout
    for attempt in itertools.count(1):
        url = next_url()
        try:
            return _post(url, body, headers or {}, deadline), url
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            wait = max(pause, _asked_to_wait(error))
            if attempt == tries or not _may_pass(error) or time.monotonic() + wait >= deadline:
                raise _explained(error, what, url, attempt) from error
        on_retry()
        time.sleep(wait)
    raise AssertionError("unreachable")


def _post(url: str, body: bytes, headers: Mapping[str, str], deadline: float) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **headers}, method="POST")
    with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as reply:
        return json.loads(reply.read())


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: not when the server understood it and refused."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in (408, 425, 429)
    return True


def _asked_to_wait(error: Exception) -> float:
    """Seconds that a busy server asks for."""
    said = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return float(said) if said.isdigit() else 0.0


def _explained(error: Exception, what: str, url: str, attempts: int) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    tries = f"{attempts} {'try' if attempts == 1 else 'tries'}"
    said = f"The {what} {url} gave no usable answer after {tries}: {type(error).__name__}: {error}"
    if isinstance(error, urllib.error.HTTPError):
        said += f". It said: {error.read(200).decode(errors='replace')}"
        if error.code == http.client.REQUEST_ENTITY_TOO_LARGE:
            return TooLarge(said)
    return TimeoutError(said) if isinstance(reason, TimeoutError) else ConnectionError(said)
