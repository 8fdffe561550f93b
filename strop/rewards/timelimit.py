"""Call a function under a time limit that always holds: in a worker process, which is killed when the time is up.

A regular expression or a sympy simplification that hangs holds the interpreter, so neither a thread nor a Python signal handler
can stop it. Here a small pool of fresh interpreters (spawned, never forked: the parent may hold a GPU) answers calls from any
thread. A time-out raises `TimeoutError`; it is never a score of 0.

    with TimeLimitedPool(workers=2) as pool:
        pool.call(score, text, truth, timeout=5.0)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from strop.registry import load_module

START_LIMIT = 120.0  # seconds for an interpreter to start, or to import the module of a function it has not seen
KILL_GRACE = 10.0


class WorkerDiedError(RuntimeError):
    """The process that ran the function ended without an answer (out of memory, a crash in native code, os._exit)."""


class TimeLimitedPool:
    """At most `workers` processes, started when needed. A call waits for a free one; waiting is not counted as its time."""

    def __init__(self, workers: int = 2):
        if workers < 1:
            raise ValueError(f"A pool needs at least one worker, not {workers}.")
        self.workers = workers
        self._closed = False
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)

    def call(self, function: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)` in a worker: its result, its exception, or `TimeoutError` after `timeout` seconds."""
        if self._closed:
            raise RuntimeError("The pool of time-limited workers is closed.")
        if not timeout > 0:
            raise ValueError(f"The time limit must be positive, it is {timeout} seconds.")
        request = _pack(function, args, kwargs, timeout)
        worker = self._idle.get()
        reusable = None
        try:
            if self._closed:
                raise RuntimeError("The pool of time-limited workers was closed while a call waited.")
            worker = worker if worker is not None and worker.alive() else _Worker()
            outcome = worker.ask(request, timeout, _name_of(function))
            reusable = worker
        finally:
            if reusable is None and worker is not None:
                worker.kill()
            self._put_back(reusable)
        succeeded, value = outcome
        if succeeded:
            return value
        raise value

    def close(self) -> None:
        """End the idle workers; a worker in use ends when its call does."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker is not None:
                    worker.kill()

    def _put_back(self, worker: _Worker | None) -> None:
        if self._closed and worker is not None:
            worker.kill()
            worker = None
        self._idle.put(worker)

    def __enter__(self) -> TimeLimitedPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@functools.cache
def shared_pool() -> TimeLimitedPool:
    """The pool of this process, for scorers that are declared slow; it ends with the process."""
    pool = TimeLimitedPool(workers=min(4, os.cpu_count() or 1))
    atexit.register(pool.close)
    return pool


class _Worker:
    """One fresh interpreter, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        start = f"import sys; sys.path[:] = {sys.path!r}; from strop.rewards.timelimit import _serve; _serve({theirs.fileno()})"
        # Its own session: a kill then reaches whatever the function started, and Ctrl-C does not reach the worker.
        self.process = subprocess.Popen(
            [sys.executable, "-c", start], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    def ask(self, request: bytes, timeout: float, name: str) -> tuple[bool, Any]:
        try:
            self.pipe.send_bytes(request)
            self._wait(START_LIMIT, f"{name} could not be imported in a worker process within {START_LIMIT:g} seconds")
            answer = self.pipe.recv_bytes()
            if answer == _RUNNING:
                self._wait(timeout, f"{name} did not answer within its limit of {timeout:g} seconds")
                answer = self.pipe.recv_bytes()
            return pickle.loads(answer)
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            code = self.process.wait(timeout=KILL_GRACE)
            raise WorkerDiedError(f"The process that ran {name} ended with exit code {code} before it answered.") from error

    def _wait(self, seconds: float, complaint: str) -> None:
        if not self.pipe.poll(seconds):
            raise TimeoutError(complaint + "; the process was killed.")

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=KILL_GRACE)
        self.pipe.close()


_RUNNING = b"running"


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> bytes:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    # A user's file has a name that only its loader knows, so the worker must load it from the same path first.
    own_file = getattr(module, "__file__", None) if getattr(module, "__name__", "").startswith("strop_plugin_") else None
    if getattr(module, "__name__", "") == "__main__":
        raise ValueError(f"{_name_of(function)} lives in the main script, which a worker cannot import; move it to a module.")
    try:
        return pickle.dumps((own_file, timeout, pickle.dumps((function, args, kwargs))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{_name_of(function)} cannot be sent to a worker process ({error}). "
            "Use a function defined at the top level of a module, and plain data as arguments."
        ) from error


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _serve(descriptor: int) -> None:
    """The life of a worker: answer requests until the parent hangs up."""
    pipe = Connection(descriptor)
    while True:
        try:
            own_file, timeout, call = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        # If the parent dies while a call hangs, nobody is left to kill this process: the kernel's own alarm does, much later.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout + START_LIMIT + KILL_GRACE))
        pipe.send_bytes(_outcome(pipe, own_file, call))
        signal.alarm(0)


def _outcome(pipe: Connection, own_file: str | None, call: bytes) -> bytes:
    try:
        if own_file is not None:
            load_module(own_file)
        function, args, kwargs = pickle.loads(call)
        pipe.send_bytes(_RUNNING)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - the border: whatever the function raises is raised again in the parent
        return pickle.dumps((False, _portable(error)))


def _portable(error: BaseException) -> Exception:
    """The same error if it survives a pickle, else its words; SystemExit and its like must end the call, not the parent."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))  # errors with their own constructors may pickle but not unpickle
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
