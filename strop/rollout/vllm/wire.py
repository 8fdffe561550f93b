"""Messages between the trainer and the subprocess that hosts vLLM: a JSON header and a block of numbers.

The two processes may run different versions of Python and torch, so nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.vllm.images import pack_images, unpack_images
from strop.types import Images

_LENGTHS = struct.Struct("<II")  # of the header and of the numbers, in bytes
Header = dict[str, Any]
"""A JSON object; each kind of message has its own keys."""
Message = tuple[Header, bytes]


class Wire:
    """One end of a socket, with a lock so that any thread can send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()

    def send(self, header: Header, numbers: bytes = b"") -> None:
        """Send one message, from any thread."""
        text = json.dumps(header).encode()
        with self._send_lock:
            self._socket.sendall(_LENGTHS.pack(len(text), len(numbers)) + text + numbers)

    def receive(self) -> Message | None:
        """The next message; None if the other side is gone."""
        lengths = self._read(_LENGTHS.size)
        if lengths is None:
            return None
        text_length, numbers_length = _LENGTHS.unpack(lengths)
        text = self._read(text_length)
        numbers = self._read(numbers_length)
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
            self._socket.shutdown(socket.SHUT_RDWR)  # unblocks a thread in recv
        self._socket.close()


def pack_request(request: Request, sampling: Sampling) -> Message:
    """A request as a message."""
    header = {
        "n": request.n,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "first": request.first,
        "sampling": asdict(sampling),
    }
    ids = array("i", request.ids).tobytes()
    if not request.images:
        return header, ids
    facts, pixels = pack_images(request.images)
    return {**header, "images": facts, "ids_bytes": len(ids)}, ids + pixels


def unpack_request(header: Header, numbers: bytes) -> tuple[Request, Sampling]:
    """The inverse of `pack_request`."""
    images: Images = ()
    if "images" in header:
        images = unpack_images(header["images"], numbers[header["ids_bytes"] :])
        numbers = numbers[: header["ids_bytes"]]
    ids = array("i", numbers).tolist()
    request = Request(ids, header["n"], header["seed"], header["max_tokens"], header["first"], images=images)
    sampling = dict(header["sampling"])
    sampling["stop_ids"] = tuple(sampling["stop_ids"])
    return request, Sampling(**sampling)


def pack_completions(completions: Sequence[Completion]) -> Message:
    """Completions as a message."""
    table = [[len(c.ids), c.finish, c.version, c.error, c.versions] for c in completions]
    ids = array("i")
    log_probs = array("f")
    for completion in completions:
        ids.extend(completion.ids)
        log_probs.extend(completion.log_probs)
    experts = [completion.experts for completion in completions if completion.experts is not None]
    shapes = [None if c.experts is None else [c.experts.dtype.name, *c.experts.shape] for c in completions]
    block = b"".join([ids.tobytes(), log_probs.tobytes(), *(one.tobytes() for one in experts)])
    return {"completions": table, "experts": shapes}, block


def unpack_completions(header: Header, numbers: bytes) -> list[Completion]:
    """The inverse of `pack_completions`."""
    size = 4 * sum(row[0] for row in header["completions"])  # an id and a log-prob have four bytes each
    ids = array("i", numbers[:size]).tolist()
    log_probs = array("f", numbers[size : 2 * size]).tolist()
    place = 2 * size
    completions = []
    start = 0
    for (length, finish, version, error, versions), shape in zip(header["completions"], header["experts"]):
        end = start + length
        spans = [(span_version, count) for span_version, count in versions]
        completion = Completion(ids[start:end], log_probs[start:end], finish, version, error, spans)
        if shape is not None:
            kind, *sizes = shape
            found = np.frombuffer(numbers, kind, math.prod(sizes), place)
            place += found.nbytes
            completion.experts = found.reshape(sizes).copy()
        completions.append(completion)
        start = end
    return completions
