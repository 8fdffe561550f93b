"""The process of one test: it runs the program as a script, then calls a function, or serves calls.

Nothing in this process is trusted once the program has started: it can change every object here. It can write
to four pipes, whose content is data to the supervisor and to the process of the assertions (`checker.py`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from strop.rewards.sandbox import calls

FILE = "program.py"
Request = Mapping[str, Any]
"""Parsed JSON of `launch.py`."""


class Program:
    """The program in the process of one test: it runs as a script, then a function or calls of assertions."""

    def __init__(self, source: str, test: Request, pipes: Mapping[str, int], packages: Sequence[str]):
        """`pipes`: "value", to which the value of a function is written; for assertions, "calls" to read
        from, and "replies"."""
        self.source = source
        self.test = test
        self.pipes = pipes
        self.packages = packages

    def run(self) -> NoReturn:
        """Run it and exit like an interpreter, but without destroying all objects, which takes longer."""
        code = 1
        try:
            self._run()
            code = 0
        except SystemExit as end:
            code = _exit_code(end)
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            _print_traceback(error)
        finally:
            _wait_for_threads()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _run(self) -> None:
        sys.path[:] = [*sys.path, *self.packages, os.getcwd()]
        sys.argv = [FILE]
        # Scripts use exit() and quit(), which `site` defines; it is not loaded.
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
        script = self.test.get("function") is None and self.test.get("assertions") is None
        module = ModuleType("__main__" if script else "program")
        sys.modules[module.__name__] = module
        execute(self.source, FILE, module)
        if self.test.get("function") is not None:
            self._send_value(self._call(module, self.test["function"], self.test["arguments"]))
        elif self.test.get("assertions") is not None:
            calls.serve(module, self.pipes["calls"], self.pipes["replies"])

    def _call(self, module: ModuleType, name: str, arguments: Sequence[object]) -> object:
        """Call the function of the program, or the method of its class Solution."""
        owner: object = module
        if hasattr(module, "Solution") and not hasattr(module, name):
            owner = module.Solution()
        return getattr(owner, name)(*arguments)

    def _send_value(self, value: object) -> None:
        with os.fdopen(self.pipes["value"], "w", encoding="utf-8") as pipe:
            json.dump({"value": value}, pipe, default=_to_json)


def execute(source: str, name: str, module: ModuleType) -> None:
    """Run source code in a module; tracebacks show its lines."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)


def _print_traceback(error: BaseException) -> None:
    """Print the traceback without the frames of this file."""
    import traceback

    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _wait_for_threads() -> None:
    """Wait for threads that are not daemons, as at the end of any script."""
    threading = sys.modules.get("threading")
    if threading is not None:
        with contextlib.suppress(Exception):
            threading._shutdown()


def _to_json(value: Any) -> object:
    """Return arrays, sets, queues and generators as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value)
