"""JSON over HTTP from any thread: requests run side by side in an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from strop.extras import require
from strop.rollout.base import EngineDied


class Refused(ValueError):
    """The server understood a request and does not want it."""


class JsonClient:
    def __init__(self, name: str, url: str, story: Callable[[], str] | None = None) -> None:
        """`name` of the engine for messages. `story` tells how the server's process ended, if it is ours."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"rollout.engine_kwargs.{name}.url={url!r} is not an http:// or https:// address.")
        self._name, self._url, self._story = name, url.rstrip("/"), story
        self._http = require("httpx", extra=name, why=f"The {name} server")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"strop-{name}-http", daemon=True)
        self._thread.start()
        # Generation takes as long as it takes, and the server queues better than a client.
        limits = self._http.Limits(max_connections=None, max_keepalive_connections=64)
        # To read all certificates takes longer than many an answer, and http:// needs none.
        transport = self._http.AsyncHTTPTransport(verify=url.startswith("https://"), limits=limits, retries=3)
        self._client = self._http.AsyncClient(base_url=self._url, timeout=None, transport=transport)

    def send(self, method: str, path: str, body: Any = None) -> Future[Any]:
        """The decoded answer; Refused where the server says why not, EngineDied where it cannot be reached."""
        return asyncio.run_coroutine_threadsafe(self._send(method, path, body), self._loop)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return self.send(method, path, body).result()

    def answers(self, path: str) -> bool:
        """Whether the server is there and well."""
        try:
            self.ask("GET", path)
        except (EngineDied, Refused):
            return False
        return True

    async def _send(self, method: str, path: str, body: Any) -> Any:
        try:
            reply = await self._client.request(method, path, json=body)
        except self._http.TransportError as error:
            story = f" {self._story()}" if self._story is not None else ""
            raise EngineDied(
                f"The {self._name} server at {self._url} cannot be reached ({type(error).__name__}: {error}).{story}"
            ) from error
        if reply.status_code >= 400:
            raise Refused(f"{path} of the {self._name} server answers {reply.status_code}: {_reason(reply)}")
        return reply.json() if "json" in reply.headers.get("content-type", "") else reply.text

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _reason(reply: Any) -> str:
    """The message inside an error's JSON, or its text."""
    try:
        found = reply.json()
    except ValueError:
        return str(reply.text)[:500]
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return str(found)
