"""The trainer's side of a vLLM that runs in a subprocess with another Python environment."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.rollout.external_host import HostProcess
from strop.rollout.vllm.wire import Header, Wire, pack_request, unpack_completions


class Remote:
    """Passes requests and commands to a Driver in the subprocess."""

    def __init__(self, python: str, arguments: Mapping[str, object], seeded: bool = False) -> None:
        local, remote = socket.socketpair()
        with remote:
            command = [python, "-m", "strop.rollout.vllm.worker", str(remote.fileno())]
            self._process = HostProcess("vllm", command, pass_fds=[remote.fileno()])
        self._wire = Wire(local)
        self._message_ids = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        """By message id: of completions for a request, of None for a command."""
        self._lock = threading.Lock()
        self._death: str | None = None
        """Why the subprocess is gone."""
        self._closing = False
        self._listener: threading.Thread | None = None
        self._wire.send({"arguments": dict(arguments), "seeded": seeded})
        first = self._wire.receive()
        if first is None:
            how_it_ended = self._process.describe_exit()
            self.close()
            raise EngineDied(f"vLLM did not start. {how_it_ended}")
        if "refused" in first[0]:
            self.close()
            raise ValueError(first[0]["refused"])
        self.log_probs: str = first[0]["ready"]
        self._listener = threading.Thread(target=self._listen, name="strop-vllm-wire", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        header, numbers = pack_request(request, sampling)
        return self._send({"command": "generate", **header}, numbers)

    def call(self, command: str, *arguments: object) -> Future[object]:
        return self._send({"command": command, "arguments": list(arguments)})

    def _send(self, header: Header, numbers: bytes = b"") -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._message_ids)
        with self._lock:
            if self._death is not None:
                future.set_exception(EngineDied(self._death))
                return future
            self._pending[number] = future
        with contextlib.suppress(OSError):  # the listener sees it too, and fails all pending futures
            self._wire.send({"id": number, **header}, numbers)
        return future

    def _listen(self) -> None:
        while (message := self._wire.receive()) is not None:
            header, numbers = message
            with self._lock:
                future = self._pending.pop(header["id"])
            if "error" in header:
                kind: Callable[[str], Exception] = ValueError if header["refused"] else EngineDied
                future.set_exception(kind(f"The vllm engine: {header['error']}"))
            elif "completions" in header:
                future.set_result(unpack_completions(header, numbers))
            else:
                future.set_result(None)
        self._fail_pending()

    def _fail_pending(self) -> None:
        """The subprocess is gone: fail all pending and all later requests."""
        with self._lock:
            pending = list(self._pending.values())
            self._pending = {}
            how = "The engine was closed." if self._closing else self._process.describe_exit()
            self._death = f"The vllm engine has gone with {len(pending)} of its requests unanswered. {how}"
        for future in pending:
            future.set_exception(EngineDied(self._death))

    def close(self) -> None:
        self._closing = True
        self._wire.close()
        if self._listener is not None:
            self._listener.join()
        self._process.close()
