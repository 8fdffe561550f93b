"""A program in the process of one test: run as a script, and then perhaps asked for a function or followed by assertions."""

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

FILE = "program.py"


class Program:
    def __init__(self, source: str, test: Mapping[str, Any], channel: int, packages: Sequence[str]):
        """`channel`: where the value of a function, or the word that all assertions held, is written."""
        self.source, self.test, self.channel, self.packages = source, test, channel, packages

    def run(self) -> NoReturn:
        """Run it and end the process as an interpreter would, but without taking everything apart first, which takes longer."""
        code = 0
        try:
            self._run()
        except SystemExit as end:
            code = _exit_code(end)
        except BaseException as error:  # noqa: BLE001 - whatever a program raises
            _show(error)
            code = 1
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
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # scripts use them; `site` is not loaded
        script = self.test.get("function") is None and self.test.get("assertions") is None
        module = ModuleType("__main__" if script else "program")
        sys.modules[module.__name__] = module
        self._execute(self.source, FILE, module)
        if self.test.get("function") is not None:
            self._tell(self._answer(module, self.test["function"], self.test["arguments"]))
        elif self.test.get("assertions") is not None:
            self._execute(self.test["assertions"], "assertions.py", module)
            self._tell(True)

    def _execute(self, source: str, name: str, module: ModuleType) -> None:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)

    def _answer(self, module: ModuleType, name: str, arguments: Sequence[Any]) -> Any:
        """The function of the program, or the method of its class Solution."""
        home = module.Solution() if hasattr(module, "Solution") and not hasattr(module, name) else module
        return getattr(home, name)(*arguments)

    def _tell(self, value: Any) -> None:
        with os.fdopen(self.channel, "w", encoding="utf-8") as channel:
            json.dump({"value": value}, channel, default=_plain)


def _show(error: BaseException) -> None:
    """The traceback, without the frames of this file."""
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
    """Those that are no daemons, as at the end of any script."""
    threading = sys.modules.get("threading")
    if threading is not None:
        with contextlib.suppress(Exception):
            threading._shutdown()


def _plain(value: Any) -> Any:
    """JSON for what is not JSON by itself: arrays, sets, queues, generators."""
    return value.tolist() if hasattr(value, "tolist") else list(value)
