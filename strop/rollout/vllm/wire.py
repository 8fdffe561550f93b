"""Messages between the trainer and the process that hosts vLLM: a JSON header and a block of numbers each.

The two sides may run different versions of Python and torch, so nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from strop.rollout.base import Completion, Request, Sampling

_LENGTHS = struct.Struct("<II")  # of the header and of the numbers, in bytes
Message = tuple[dict[str, Any], bytes]


class Wire:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], numbers: bytes = b"") -> None:
        """Safe from any thread."""
        text = json.dumps(header).encode()
        with self._sending:
            self._socket.sendall(_LENGTHS.pack(len(text), len(numbers)) + text + numbers)

    def receive(self) -> Message | None:
        """The next message; None when the other side is gone."""
        lengths = self._read(_LENGTHS.size)
        if lengths is None:
            return None
        text_length, numbers_length = _LENGTHS.unpack(lengths)
        text, numbers = self._read(text_length), self._read(numbers_length)
        if text is None or numbers is None:
            return None
        return json.loads(text), numbers

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(min(count - len(parts), 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever is receiving
        self._socket.close()


def pack_request(request: Request, sampling: Sampling) -> Message:
    header = {
        "n": request.n,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "first": request.first,
        "sampling": asdict(sampling),
    }
    return header, array("i", request.ids).tobytes()


def unpack_request(header: dict[str, Any], numbers: bytes) -> tuple[Request, Sampling]:
    sampling = header["sampling"]
    ids = array("i", numbers).tolist()
    return (
        Request(ids, header["n"], header["seed"], header["max_tokens"], header["first"]),
        Sampling(**{**sampling, "stop_ids": tuple(sampling["stop_ids"])}),
    )


def pack_completions(completions: Sequence[Completion]) -> Message:
    table = [[len(c.ids), c.finish, c.version, c.error, c.versions] for c in completions]
    ids, log_probs = array("i"), array("f")
    for completion in completions:
        ids.extend(completion.ids)
        log_probs.extend(completion.log_probs)
    return {"completions": table}, ids.tobytes() + log_probs.tobytes()


def unpack_completions(header: dict[str, Any], numbers: bytes) -> list[Completion]:
    half = len(numbers) // 2  # an id and a log-prob have four bytes each
    ids, log_probs = array("i", numbers[:half]).tolist(), array("f", numbers[half:]).tolist()
    completions, start = [], 0
    for length, finish, version, error, versions in header["completions"]:
        end = start + length
        spans = [(of, count) for of, count in versions]
        completions.append(Completion(ids[start:end], log_probs[start:end], finish, version, error, spans))
        start = end
    return completions
