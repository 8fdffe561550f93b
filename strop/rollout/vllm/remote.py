"""The trainer's side of a vLLM that runs in a process of another environment."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.rollout.process import HostProcess
from strop.rollout.vllm.wire import Wire, pack_request, unpack_completions


class Remote:
    """Takes what Driver takes, and passes it on."""

    def __init__(self, python: str, arguments: Mapping[str, Any], seeded: bool = False) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [python, "-m", "strop.rollout.vllm.worker", str(theirs.fileno())]
            self._process = HostProcess("vllm", command, pass_fds=[theirs.fileno()])
        self._wire = Wire(ours)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._death: str | None = None
        self._closing = False
        self._listener: threading.Thread | None = None
        self._wire.send({"arguments": dict(arguments), "seeded": seeded})
        first = self._wire.receive()
        if first is None:
            story = self._process.story()
            self.close()
            raise EngineDied(f"vLLM did not start. {story}")
        if "refused" in first[0]:
            self.close()
            raise ValueError(first[0]["refused"])
        self.log_probs: str = first[0]["ready"]
        self._listener = threading.Thread(target=self._listen, name="strop-vllm-wire", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        header, numbers = pack_request(request, sampling)
        return self._send({"do": "ask", **header}, numbers)

    def call(self, what: str, *arguments: Any) -> Future[Any]:
        return self._send({"do": what, "arguments": list(arguments)})

    def _send(self, header: dict[str, Any], numbers: bytes = b"") -> Future[Any]:
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._death is None:
                self._waiting[number] = answer
            else:
                answer.set_exception(EngineDied(self._death))
                return answer
        with contextlib.suppress(OSError):  # the listener hears of it too, and tells all who wait
            self._wire.send({"id": number, **header}, numbers)
        return answer

    def _listen(self) -> None:
        while (message := self._wire.receive()) is not None:
            header, numbers = message
            with self._lock:
                answer = self._waiting.pop(header["id"])
            if "error" in header:
                kind = ValueError if header["refused"] else EngineDied
                answer.set_exception(kind(f"The vllm engine: {header['error']}"))
            elif "completions" in header:
                answer.set_result(unpack_completions(header, numbers))
            else:
                answer.set_result(None)
        self._mourn()

    def _mourn(self) -> None:
        """Nobody is left on the other side: tell all who wait, and all who will ask."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
            count = len(waiting)
            how = "The engine was closed." if self._closing else self._process.story()
            self._death = f"The vllm engine has gone with {count} of its requests unanswered. {how}"
        for answer in waiting:
            answer.set_exception(EngineDied(self._death))

    def close(self) -> None:
        self._closing = True
        self._wire.close()
        if self._listener is not None:
            self._listener.join()
        self._process.close()
