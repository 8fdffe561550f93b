"""How external engines are reached: a client for JSON over HTTP, and a subprocess that hosts an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strop
from strop.extras import require
from strop.http_replies import limit_replies
from strop.rollout.base import Completion, EngineDied, Request, error_completions

if TYPE_CHECKING:
    import httpx

_MAX_SHOWN = 200
"""Characters of an output line in a message."""
_ERROR_LINE = re.compile(r"\b(\w*Error|\w*Exception|error|fatal|killed|out of memory)\b", re.IGNORECASE)
_kept_in: list[Path] = []
"""The folder for the output of processes that died; the last entry counts."""
_TERMINATE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
_IDLE_SECONDS = 2.0
"""After which an unused connection is closed. vLLM and SGLang close it after 5 seconds, and a request that is
sent at that moment would be lost."""
_GUARD = 'read -r _; kill -s KILL -- "-$1"; rm -rf "$2"'
"""Shell script that waits for the end of its stdin, which is the end of this process, however it comes."""

Json = Any
"""A decoded JSON value of a server's reply; the caller knows its layout."""


class ServerRefused(ValueError):
    """The server answered a request with an HTTP error, or with a reply that cannot be used."""


class JsonClient:
    """JSON over HTTP, usable from any thread: requests run concurrently in an event loop in its own
    thread."""

    def __init__(self, name: str, url: str, describe_exit: Callable[[], str] | None = None) -> None:
        """`name`: of the engine, for messages. `describe_exit`: tells how the server's process ended, if we
        started it."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"rollout.engine_kwargs.{name}.url={url!r} is not an http:// or https:// address."
            )
        self._name = name
        self._url = url.rstrip("/")
        self._describe_exit = describe_exit
        self._http = require("httpx", extra=name, why=f"The {name} server")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"strop-{name}-http", daemon=True)
        self._thread.start()
        # No timeout and no limit of connections: generation takes long, and the server does the queueing.
        limits = self._http.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_SECONDS
        )
        # http:// needs no certificates, and loading them is slow.
        transport = self._http.AsyncHTTPTransport(verify=url.startswith("https://"), limits=limits, retries=3)
        self._client = self._http.AsyncClient(base_url=self._url, timeout=None, transport=transport)
        limit_replies(self._http, self._client, ServerRefused)

    def send(self, method: str, path: str, body: object = None) -> Future[Json]:
        """The decoded reply. Fails with ServerRefused for an HTTP error, EngineDied if the server is
        unreachable."""
        return asyncio.run_coroutine_threadsafe(self._send(method, path, body), self._loop)

    def request(self, method: str, path: str, body: object = None) -> Json:
        """Like `send`, but waits for the reply."""
        return self.send(method, path, body).result()

    def is_healthy(self, path: str) -> bool:
        """Whether GET `path` succeeds."""
        try:
            self.request("GET", path)
        except (EngineDied, ServerRefused):
            return False
        return True

    async def _send(self, method: str, path: str, body: object) -> Json:
        try:
            reply = await self._client.request(method, path, json=body)
        except self._http.TransportError as error:
            how_it_ended = "" if self._describe_exit is None else f" {self._describe_exit()}"
            raise EngineDied(
                f"The {self._name} server at {self._url} cannot be reached ({type(error).__name__}: "
                f"{error}).{how_it_ended}"
            ) from error
        if reply.status_code >= 400:
            raise ServerRefused(
                f"{path} of the {self._name} server answers {reply.status_code}: {_error_message(reply)}"
            )
        if "json" not in reply.headers.get("content-type", ""):
            return reply.text
        try:
            return reply.json()
        except (ValueError, RecursionError) as error:
            raise ServerRefused(
                f"{path} of the {self._name} server answers with text that is no JSON: {str(error)[:200]}"
            ) from error

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def completions_of(
    request: Request, name: str, version: int, read: Callable[[], list[Completion]], count: int
) -> list[Completion]:
    """What `read` finds in a reply to a request for `count` samples; with finish=error if the reply has
    another layout. An exception in a callback of a future is only logged, and the caller would wait
    forever."""
    try:
        found = read()
        if len(found) != count:
            raise ValueError(f"it has {len(found)} of {count} samples")
        for one in found:
            if len(one.ids) > len(one.log_probs) and one.finish == "abort":
                one.ids = one.ids[: len(one.log_probs)]  # it may be continued from there
            if len(one.ids) != len(one.log_probs):
                raise ValueError(f"it has {len(one.log_probs)} log-probs of {len(one.ids)} tokens")
        return found
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"the reply of the {name} server cannot be read ({type(error).__name__}: {error})"
        return error_completions(request, reason, version)


def _error_message(reply: httpx.Response) -> str:
    """The message inside the JSON of an error, or its text."""
    try:
        found = reply.json()
    except (ValueError, RecursionError):
        return str(reply.text)[:500]
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return str(found)


def keep_output_in(folder: Path | None) -> None:
    """Processes that die leave their output in this folder; with None, in that of temporary files."""
    _kept_in.clear()
    if folder is not None:
        _kept_in.append(folder.absolute())


class HostProcess:
    """A subprocess that hosts an engine. Its output goes to a file, which is kept when it dies. It ends with
    this process, even if this one is killed: it would keep a GPU and a temporary folder."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._command = list(command)
        self._folder = tempfile.TemporaryDirectory(prefix=f"strop-{name}-")
        self._log = Path(self._folder.name) / "output.log"
        self._kept: Path | None = None
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": self._python_path(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,  # so that its children can be ended with it
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self.pid), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def describe_exit(self) -> str:
        """How the process ended and its most telling line of output, then where its whole output is."""
        try:
            code: int | None = self._process.wait(timeout=_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        ended = "stopped answering" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                ended += f" ({signal.Signals(-code).name})"
        lines = self._log.read_text(errors="replace").splitlines()
        output = f"Its command and its output ({len(lines)} lines) are in {self._keep_output(lines)}."
        return f"The {self.name} process (id {self.pid}) {ended}; {telling_line(lines)}\n{output}"

    def _keep_output(self, lines: Sequence[str]) -> Path:
        """Write the command and the output to a file that outlives this object; its path."""
        if self._kept is None:
            text = "\n".join([f"$ {shlex.join(self._command)}", *lines, ""])
            for folder in [*_kept_in, Path(tempfile.gettempdir())]:
                path = folder / f"{self.name}_{self.pid}.log"
                with contextlib.suppress(OSError):  # a folder that is full or not writable
                    folder.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
                    self._kept = path
                    break
        return self._kept or self._log

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_TERMINATE_SECONDS)
        self._guard.kill()
        self._guard.communicate()
        self._folder.cleanup()

    def _python_path(self) -> str:
        """A folder with a link to this package only: its site-packages may hold libraries of another
        environment."""
        package = Path(strop.__file__).parent
        (Path(self._folder.name) / "strop").symlink_to(package, target_is_directory=True)
        inherited = os.environ.get("PYTHONPATH")
        return os.pathsep.join(filter(None, [self._folder.name, inherited]))


def telling_line(lines: Sequence[str]) -> str:
    """The last line of an output that looks like an error, or else its last line, for a message."""
    filled = [line.strip() for line in lines if line.strip()]
    if not filled:
        return "it printed nothing."
    errors = [line for line in filled if _ERROR_LINE.search(line)]
    if errors:
        return f"its last error: {errors[-1][:_MAX_SHOWN]}"
    return f"its last line: {filled[-1][:_MAX_SHOWN]}"
