"""POST JSON to a server, with retries until a deadline.

A server that is not there (connection refused or reset, 408, 425, 429, 502, 503, 504) may be restarting: the
request is sent again, with growing pauses, until its timeout. Other failures (500, a reply that is not JSON)
are more likely a fault of the server, and are tried a few times only. Sizes of replies are limited by
`strop.http_replies`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from strop.http_replies import ReplyTooLarge, read_reply

logger = logging.getLogger(__name__)

MAX_FAULTS = 5
"""Tries that a server may answer with 500 or with something that is not JSON."""
PAUSE = 1.0
"""Seconds before the second try; each further pause is twice as long."""
MAX_PAUSE = 30.0
UNAVAILABLE_STATUS = (408, 425, 429, 502, 503, 504)
NOTICE_SECONDS = 60.0
"""Between two warnings about the same server."""


class RequestTooLarge(ConnectionError):
    """The server refused the size of the request (HTTP 413)."""


def post_json(
    next_url: Callable[[], str],
    content: object,
    *,
    what: str,
    timeout: float,
    headers: Mapping[str, str] | None = None,
    max_faults: int = MAX_FAULTS,
    pause: float = PAUSE,
    on_retry: Callable[[], None] = lambda: None,
) -> tuple[object, str]:
    """Return the parsed reply, and the URL that it came from; each try goes to `next_url()`.

    If no try succeeds within `timeout` seconds: TimeoutError or ConnectionError, which name the server as
    `what`. RequestTooLarge and ReplyTooLarge are raised at once.
    """
    body = json.dumps(content, default=str).encode()
    deadline = time.monotonic() + timeout
    faults = 0
    attempt = 0
    while True:
        url = next_url()
        attempt += 1
        try:
            reply = _post(url, body, headers or {}, deadline)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            faults += not _is_unavailable(error)
            left = deadline - time.monotonic()
            # Near the deadline the pauses get shorter, so that the timeout is used to its end.
            wait = max(min(pause * 2 ** min(attempt - 1, 16), MAX_PAUSE, left / 2), _retry_after(error))
            if faults >= max_faults or _is_refusal(error) or left < pause or wait >= left:
                raise _explained(error, what, url, attempt) from error
            _notices.failed(what, url, error, left)
        else:
            _notices.answered(what, url)
            return reply, url
        on_retry()
        time.sleep(wait)


class OutageNotices:
    """Warns when a server does not answer, and says when it answers again; many requests fail at once, so
    each server is named once per NOTICE_SECONDS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._down: dict[str, tuple[float, float]] = {}
        """By address: when the outage began, and when it was last logged."""

    def failed(self, what: str, url: str, error: Exception, left: float) -> None:
        now = time.monotonic()
        with self._lock:
            since, logged = self._down.get(url, (now, -NOTICE_SECONDS))
            due = now - logged >= NOTICE_SECONDS
            self._down[url] = (since, now if due else logged)
        if due:
            logger.warning(
                "The %s %s does not answer (%s: %s). It is tried again for %.0f s.",
                *(what, url, type(error).__name__, error, left),
            )

    def answered(self, what: str, url: str) -> None:
        if url not in self._down:
            return
        with self._lock:
            found = self._down.pop(url, None)
        if found is not None:
            logger.warning("The %s %s answers again, after %.1f s.", what, url, time.monotonic() - found[0])


_notices = OutageNotices()


def _post(url: str, body: bytes, headers: Mapping[str, str], deadline: float) -> object:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json", **headers}, method="POST"
    )
    content: object = json.loads(read_reply(request, deadline))
    return content


def get_json(url: str, headers: Mapping[str, str], *, timeout: float) -> object:
    """Return what GET of an address gives, without retries; OSError or ValueError if that fails."""
    request = urllib.request.Request(url, headers=dict(headers))
    content: object = json.loads(read_reply(request, time.monotonic() + timeout))
    return content


def _is_unavailable(error: Exception) -> bool:
    """Whether the server is not there, or has no time now."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in UNAVAILABLE_STATUS
    return isinstance(error, OSError | http.client.RemoteDisconnected | http.client.IncompleteRead)


def _is_refusal(error: Exception) -> bool:
    """Whether the same request would end in the same way: the server understood and refused it, or its reply
    is too large."""
    if isinstance(error, ReplyTooLarge):
        return True
    if not isinstance(error, urllib.error.HTTPError):
        return False
    return error.code < 500 and error.code not in UNAVAILABLE_STATUS


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
        with contextlib.suppress(OSError, http.client.HTTPException):  # the reason may not arrive in time
            message += f". It said: {error.read(200).decode(errors='replace')}"
        if error.code == http.client.REQUEST_ENTITY_TOO_LARGE:
            return RequestTooLarge(message)
    if isinstance(cause, TimeoutError):
        return TimeoutError(message)
    if isinstance(cause, ReplyTooLarge):
        return ReplyTooLarge(message)
    return ConnectionError(message)
