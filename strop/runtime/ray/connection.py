"""Ray as a library, and the connection to a cluster. This is the only file that imports Ray.

Ray is optional and slow to import, so it is imported when the first function here is called. The protocols
name the little of Ray's handles that the other files of this folder use.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Protocol

from strop.extras import require
from strop.stopping import SIGNALS

COLOUR = re.compile("\x1b\\[[0-9;]*m")
HEAD_TIMEOUT = 5.0
"""Seconds that the head of the cluster may be silent."""


class ObjectRef(Protocol):
    """A value in Ray's object store, or the result of a remote call."""

    def future(self) -> Future[Any]: ...


class RemoteMethod(Protocol):
    def remote(self, *arguments: object, **named: object) -> ObjectRef: ...


class ActorHandle(Protocol):
    """A Ray actor. Its methods are those of the class that was made remote."""

    def __getattr__(self, name: str) -> RemoteMethod: ...


class PlacementGroup(Protocol):
    """Reserved resources: one bundle per machine."""

    def wait(self, timeout_seconds: float) -> bool: ...


class ClusterLost(ValueError):
    """The head of the cluster does not answer any more."""


def ray_module(why: str = "trainer.runtime=ray") -> ModuleType:
    """Import Ray; a ValueError with the name of the extra when it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return require("ray", extra="ray", why=why)


def connect_to_cluster(address: str, namespace: str) -> ModuleType:
    """Return Ray, connected to the cluster that launched this rank."""
    ray = ray_module("A role on its own machines")
    if not ray.is_initialized():
        with kept_signal_handlers():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    return ray


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT after the block. `ray.init` installs one for SIGTERM that
    ends the process with a stack: a run would end without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: installed by C code, which cannot be restored from here
                signal.signal(number, handler)


def bundle_strategy(group: PlacementGroup, bundle: int) -> object:
    """Return the scheduling strategy that places an actor in one bundle of a placement group."""
    strategies = require("ray.util.scheduling_strategies", extra="ray", why="trainer.runtime=ray")
    return strategies.PlacementGroupSchedulingStrategy(group, bundle)


def future_of(
    ray: ModuleType, reference: ObjectRef, actor_died: Callable[[BaseException], Exception]
) -> Future[Any]:
    """Return the future of a remote call. When the actor dies, its error is what `actor_died` returns."""
    answer: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, ray.exceptions.RayActorError):
            answer.set_exception(actor_died(error))
        else:
            answer.set_exception(error)

    reference.future().add_done_callback(settle)
    return answer


def short_error(error: BaseException) -> str:
    """Return what Ray says, without its table of properties."""
    text = COLOUR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 4:
        return " ".join(lines)[-400:]
    return f"{lines[0][:300]} {lines[-1][:400]}"


class ClusterHead:
    """The head process, which every process of the cluster must be able to reach."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._last_contact = time.monotonic()

    def silent_for(self) -> float:
        """Return the seconds since the head last accepted a connection."""
        with suppress(OSError):
            self.connect(timeout=1.0)
            self._last_contact = time.monotonic()
        return time.monotonic() - self._last_contact

    def connect(self, timeout: float = HEAD_TIMEOUT) -> None:
        """Open and close a connection; OSError when that fails."""
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=timeout).close()
