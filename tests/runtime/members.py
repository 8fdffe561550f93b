"""Replicas in processes of their own, without a cluster: what transports bring them is weighed, and any of them may be killed.

    python -m tests.runtime.members ADDRESS NUMBER STALL

is such a process: a `RolloutReplica` around an engine that keeps digests of its weights, and waits at the weight named STALL
until it is let go.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.runtime.rollout_replica import RolloutReplica
from strop.runtime.weight_broadcast import Rendezvous
from tests.forked import Forked


def digest(weight: Tensor) -> tuple[str, tuple[int, ...], str]:
    raw = weight.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return str(weight.dtype), tuple(weight.shape), hashlib.sha256(raw).hexdigest()


class Scales:
    """An engine that weighs."""

    def __init__(self, stall: str, folder: Path) -> None:
        self.version, self.updates, self.stall, self.folder = 0, 0, stall, folder
        self.found: dict[str, Any] = {}

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.updates += 1
        for name, weight in weights:
            if name == self.stall:
                (self.folder / "stays").touch()
                while not (self.folder / "goes on").exists():
                    time.sleep(0.01)
            self.found[name] = digest(weight)
        self.version = version


class Plan:
    """A recipe of such an engine."""

    def __init__(self, stall: str, folder: Path) -> None:
        self.stall, self.folder = stall, folder

    def make(self) -> Scales:
        return Scales(self.stall, self.folder)

    def place(self) -> torch.device:
        return torch.device("cpu")


async def serve(connection: Connection, stall: str, folder: Path) -> None:
    replica: Any = RolloutReplica(Plan(stall, folder))  # type: ignore[arg-type]
    lock = threading.Lock()

    async def answer(call: int, method: str, arguments: Sequence[Any]) -> None:
        found: Any
        try:
            if method == "weigh":
                found = (replica.engine.version, replica.engine.updates, dict(replica.engine.found))
            else:
                found = await getattr(replica, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            found = error
        with lock:
            connection.send((call, found))

    tasks = []
    with suppress(EOFError):
        while True:
            tasks.append(asyncio.create_task(answer(*await asyncio.to_thread(connection.recv))))


class Member:
    """The other side of the connection."""

    def __init__(self, number: int, stall: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory()
        with Listener(f"{self._folder.name}/socket") as listener:
            words = [str(listener.address), str(number), stall]
            self.process = Forked("tests.runtime.members", words, Path(self._folder.name, "log"))
            self._connection = listener.accept()
        self._calls: dict[int, Future[Any]] = {}
        self._count = itertools.count()
        threading.Thread(target=self._hear, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        number, done = next(self._count), Future[Any]()
        self._calls[number] = done
        try:
            self._connection.send((number, method, arguments))
        except OSError:
            done.set_exception(ConnectionError("it is gone"))
        return done

    def _hear(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, found = self._connection.recv()
                done = self._calls.pop(number)
                done.set_exception(found) if isinstance(found, Exception) else done.set_result(found)
        for done in self._calls.values():
            if not done.done():
                done.set_exception(ConnectionError("it is gone"))

    @property
    def stays(self) -> bool:
        """At the weight where it stalls."""
        return Path(self._folder.name, "stays").exists()

    def let_go(self) -> None:
        Path(self._folder.name, "goes on").touch()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


class Team:
    """The `WeightReceivers` of transports, which replaces the dead as the pool of a cluster does."""

    def __init__(self, size: int, stall: str = "") -> None:
        self.size = size
        self.members = [Member(number, stall) for number in range(size)]
        self.lives = [0] * size
        self.kept: list[tuple[Any, str]] = []
        self.loads, self.expected, self.why_not = 0, False, ""

    def put(self, memory: np.ndarray) -> Any:
        return memory.copy()

    def load(self, box: Any, contents: str, version: int) -> Future[Any]:
        self.loads += 1
        self.kept = [(box, contents)] if '"first": true' in contents else [*self.kept, (box, contents)]
        done: Future[Any] = Future()
        last = '"last": true' in contents
        for number, asked in enumerate(
            [member.call("load", box, contents, version) for member in self.members]
        ):
            try:
                asked.result(100)
            except ConnectionError:
                if last:
                    self.mend(number, version)
        done.set_result(None)
        return done

    def mend(self, number: int, version: int) -> None:
        self.members[number].end()
        self.members[number] = Member(number)
        self.lives[number] += 1
        for box, contents in self.kept:
            self.members[number].call("load", box, contents, version).result(100)

    def begin_update(self, version: int) -> Sequence[int]:
        self.expected = True
        return list(self.lives)

    def keep_copy(self, buckets: Sequence[tuple[Any, str]], version: int, why_not: str = "") -> None:
        self.kept, self.expected, self.why_not = list(buckets), False, why_not

    def address(self) -> str:
        return "127.0.0.1"

    def join(self, number: int, rendezvous: Rendezvous) -> Future[Any]:
        return self.members[number].call("join", rendezvous, number + 1)

    def receive(self, number: int, version: int) -> Future[Any]:
        return self.members[number].call("receive", version)

    def weigh(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Version, updates and digests of each."""
        return [member.call("weigh").result(100) for member in self.members]

    def close(self) -> None:
        for member in self.members:
            member.end()


if __name__ == "__main__":
    asyncio.run(serve(Client(sys.argv[1]), sys.argv[3], Path(sys.argv[1]).parent))
    sys.exit()
