"""Call a function with a timeout that always works: in a worker process, which is killed when it is late.

A regular expression or a sympy simplification that hangs holds the GIL, so neither a thread nor a Python
signal handler can stop it. `TimeLimitedPool` is a small pool of fresh interpreters (spawned, never forked:
the parent may use a GPU) that can be called from any thread. A timeout raises `TimeoutError`; it is never a
score of 0.

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
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import NamedTuple

from strop.registry import load_module

START_LIMIT = 120.0  # seconds for an interpreter to start, or to import the module of a new function
KILL_GRACE = 10.0
_RUNNING = b"running"


class WorkerDiedError(RuntimeError):
    """The worker process ended without an answer (out of memory, a crash in native code, os._exit)."""


class TimeLimitedPool:
    """At most `workers` processes, started when needed; waiting for a free one does not count as call
    time."""

    def __init__(self, workers: int = 2):
        if workers < 1:
            raise ValueError(f"A pool needs at least one worker, not {workers}.")
        self.workers = workers
        self._closed = False
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)

    def call(
        self, function: Callable[..., object], *args: object, timeout: float, **kwargs: object
    ) -> object:
        """Return or raise what `function(*args, **kwargs)` does in a worker; TimeoutError after `timeout`
        s."""
        return self.run(function, args, kwargs, timeout)

    def run(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        timeout: float,
    ) -> object:
        """As `call`, for arguments of any name."""
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
            if worker is None or not worker.alive():
                worker = _Worker()
            outcome = worker.call(request, timeout, _name_of(function))
            reusable = worker
        finally:
            if reusable is None and worker is not None:
                worker.kill()
            self._put_back(reusable)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def close(self) -> None:
        """Kill the idle workers; a busy one ends with its call."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def shared_pool() -> TimeLimitedPool:
    """Return the pool of this process for scorers that are declared slow."""
    pool = TimeLimitedPool(workers=min(4, os.cpu_count() or 1))
    atexit.register(pool.close)
    return pool


class _Outcome(NamedTuple):
    """What a call returned, or the exception that it raised."""

    value: object = None
    error: Exception | None = None


class _Worker:
    """One fresh interpreter, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, child_pipe = Pipe()
        boot = (
            f"import sys; sys.path[:] = {sys.path!r}; from strop.rewards.timelimit import _serve; "
            f"_serve({child_pipe.fileno()})"
        )
        # A session of its own: a kill reaches all processes that the function started, and Ctrl-C does not
        # reach the worker.
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[child_pipe.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_pipe.close()

    def call(self, request: bytes, timeout: float, name: str) -> _Outcome:
        """Send a packed call and wait for its outcome."""
        try:
            self.pipe.send_bytes(request)
            self._wait(
                START_LIMIT,
                f"{name} could not be imported in a worker process within {START_LIMIT:g} seconds",
            )
            answer = self.pipe.recv_bytes()
            if answer == _RUNNING:
                self._wait(timeout, f"{name} did not answer within its limit of {timeout:g} seconds")
                answer = self.pipe.recv_bytes()
            outcome: _Outcome = pickle.loads(answer)
            return outcome
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            code = self.process.wait(timeout=KILL_GRACE)
            raise WorkerDiedError(
                f"The process that ran {name} ended with exit code {code} before it answered."
            ) from error

    def _wait(self, seconds: float, message: str) -> None:
        if not self.pipe.poll(seconds):
            raise TimeoutError(message + "; the process was killed.")

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=KILL_GRACE)
        self.pipe.close()


def _pack(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], timeout: float
) -> bytes:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    module_name = getattr(module, "__name__", "")
    if module_name == "__main__":
        raise ValueError(
            f"{_name_of(function)} is defined in the main script, which a worker cannot import; move it to a "
            "module."
        )
    # A user's file is imported under a generated module name, so the worker must load it by path first.
    user_file = None
    if module_name.startswith("strop_plugin_"):
        user_file = getattr(module, "__file__", None)
    try:
        return pickle.dumps((user_file, timeout, pickle.dumps((function, args, kwargs))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{_name_of(function)} cannot be sent to a worker process ({error}). Use a function defined at "
            "the top level of a module, and plain data as arguments."
        ) from error


def _name_of(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


# --- In the worker process ----------------------------------------------------------------------------------


def _serve(descriptor: int) -> None:
    """Run calls until the parent closes the pipe."""
    pipe = Connection(descriptor)
    while True:
        try:
            user_file, timeout, call = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        # If the parent dies while a call hangs, no process is left to kill this one; SIGALRM does, much
        # later.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout + START_LIMIT + KILL_GRACE))
        pipe.send_bytes(_run_call(pipe, user_file, call))
        signal.alarm(0)


def _run_call(pipe: Connection, user_file: str | None, call: bytes) -> bytes:
    try:
        if user_file is not None:
            load_module(user_file)
        function, args, kwargs = pickle.loads(call)
        pipe.send_bytes(_RUNNING)
        return pickle.dumps(_Outcome(function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - every error of the function is raised again in the parent
        return pickle.dumps(_Outcome(error=_portable(error)))


def _portable(error: BaseException) -> Exception:
    """Return the error if it can be pickled, else its text; SystemExit must end the call, not the parent."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))  # some errors with their own constructor do not unpickle
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
