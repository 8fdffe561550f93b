"""The trusted process of assertions: it runs them with stand-ins for the functions of the program.

The program runs in another process (`calls.py`), so it can neither read the assertions nor reach them. It
gives values and nothing else. A stand-in for an object of the program can be called, indexed and iterated;
comparing it, or asking whether it is true, ends the test as failed, because the answer would be the
program's.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from strop.rewards.sandbox.calls import LENGTH_BYTES, is_plain_class
from strop.rewards.sandbox.program import execute

MODULE = "assertions"
FILE = "assertions.py"
UNSUPPORTED = "The test cannot be used:"
_MODULE_NAMES = {"np": "numpy", "pd": "pandas"}
_READABLE = ("__name__", "__doc__", "__dict__", "__qualname__")
"""Special attributes that a stand-in has; libraries take others as a promise of what the object is."""


class NotTrusted(BaseException):
    """The test asked the program for a judgment, or the program gave no value.

    It is no `Exception`, so that no test takes it for an expected error.
    """


def check(source: str, pipes: Mapping[str, int], packages: Sequence[str], limit: int) -> NoReturn:
    """Run assertions, write true to the pipe "value" if they hold, and exit.

    What they print, and the lines of a traceback, are dropped: they may show what later tests of the same
    program expect, and the process of a later test is a copy of the one that reads this output.
    """
    code = 1
    note = ""
    notes = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        sys.path[:] = [*sys.path, *packages]
        module = ModuleType(MODULE)
        sys.modules[MODULE] = module
        program = ProgramCalls(pipes["calls"], pipes["replies"], limit)
        module.__dict__.update(program.names(free_names(source)))
        execute(source, FILE, module)
        with os.fdopen(pipes["value"], "w", encoding="utf-8") as pipe:
            json.dump({"value": True}, pipe)
        code = 0
    except NotTrusted as refusal:
        note = str(refusal)
    except BaseException as error:  # noqa: BLE001 - assertions may raise anything
        note = f"{type(error).__name__} in line {_line(error)} of the assertions."
    os.write(notes, f"{note}\n".encode("utf-8", "replace"))
    os._exit(code)


def _line(error: BaseException) -> int:
    """Return the line of the assertions in which an exception came up."""
    line = 0
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == FILE:
            line = step.tb_lineno
        step = step.tb_next
    return line


def free_names(source: str) -> list[str]:
    """Return the names that the assertions may take from the program; names of builtins stay Python's."""
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return sorted(name for name in names if name not in builtins.__dict__)


class ProgramCalls:
    """The connection to the process of the program."""

    def __init__(self, calls: int, replies: int, limit: int):
        """`limit`: bytes of a reply."""
        self.calls = calls
        self.replies = os.fdopen(replies, "rb")
        self.limit = limit
        self.functions: list[FunctionType] = []
        self.stand_ins: dict[int, StandIn] = {}
        self.exceptions: dict[int, type[Exception]] = {}

    def names(self, wanted: Sequence[str]) -> dict[str, object]:
        """Return the values of those names that the program defines."""
        found: dict[str, object] = {}
        for name, encoded in self._ask("names", list(wanted)).get("names", {}).items():
            if name not in wanted:
                continue
            if encoded != ["module"]:
                found[name] = self.decode(encoded)
                continue
            # The name in the assertions decides, so that a program cannot exchange a module.
            module = _MODULE_NAMES.get(name, name)
            if module in sys.stdlib_module_names or module in _MODULE_NAMES.values():
                found[name] = importlib.import_module(module)
        return found

    def call(self, target: StandIn, arguments: tuple[object, ...], named: dict[str, object]) -> object:
        """Call an object; lists, dicts and sets that it changes are changed here too."""
        reply = self._ask("call", target, arguments, named)
        value = self.decode(reply.get("value"))
        given: dict[int | str, object] = dict(enumerate(arguments))
        given.update(named)
        for key, encoded in reply.get("changed", []):
            _replace(given.get(key), self.decode(encoded))
        return value

    def operate(self, operation: str, *arguments: object) -> object:
        return self.decode(self._ask(operation, *arguments).get("value"))

    def _ask(self, *message: object) -> dict[str, Any]:
        self._send(message)
        while True:
            reply = self._receive()
            if "callback" in reply:
                self._call_back(reply)
            elif "error" in reply:
                kind = self.decode(reply["error"])
                if not isinstance(kind, type) or not issubclass(kind, Exception):
                    raise NotTrusted("The program raised what is no exception.")
                raise kind(str(reply.get("message", "")))
            else:
                return reply

    def _call_back(self, reply: dict[str, Any]) -> None:
        """Call a function that the assertions gave to the program."""
        try:
            function = self.functions[reply["callback"]]
            result = function(*self.decode(reply["arguments"]))
        except Exception as error:  # noqa: BLE001 - a function of the test may raise anything
            self._send((True, error))
        else:
            self._send((False, result))

    def _send(self, message: object) -> None:
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(message)
        content = buffer.getvalue()
        content = len(content).to_bytes(LENGTH_BYTES, "big") + content
        try:
            while content:
                content = content[os.write(self.calls, content) :]
        except BrokenPipeError:
            raise NotTrusted("The program ended before the test.") from None

    def _receive(self) -> dict[str, Any]:
        line = self.replies.readline(self.limit)
        if not line.endswith(b"\n"):
            raise NotTrusted("The program ended before the test, or returned too much.")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise NotTrusted("The reply of the program cannot be read.")
        return reply

    def decode(self, encoded: Any) -> Any:
        """Return a value; `NotTrusted` if it is not one."""
        try:
            return self._decode(encoded)
        except (ArithmeticError, ImportError, LookupError, RecursionError, TypeError, ValueError):
            raise NotTrusted("The value of the program cannot be read.") from None

    def _decode(self, encoded: Any) -> Any:
        if not isinstance(encoded, list):
            if isinstance(encoded, dict):
                raise ValueError("dicts are tagged")
            return encoded
        kind, *content = encoded
        if kind in _SEQUENCES:
            [items] = content
            return _SEQUENCES[kind](map(self._decode, items))
        if kind == "dict":
            [items] = content
            return {self._decode(key): self._decode(item) for key, item in items}
        if kind == "object":
            [number] = content
            return self.stand_ins.setdefault(int(number), StandIn(self, int(number)))
        if kind == "exception":
            return self._exception(*content)
        if kind == "builtin":
            return _plain_class(content[0])
        if kind == "ndarray":
            return self._array(*content)
        return _SCALARS[kind](*content)

    def _exception(self, number: int, name: str, base: str) -> type[Exception]:
        """Return a class that stands for one of the program."""
        parent = _plain_class(base)
        if not issubclass(parent, Exception):
            raise TypeError("not an exception")
        if number not in self.exceptions:
            self.exceptions[number] = type(str(name), (parent,), {"__init__": Exception.__init__})
        return self.exceptions[number]

    def _array(self, kind: str, items: Any) -> object:
        numpy = importlib.import_module("numpy")
        if numpy.dtype(kind).kind not in "biufcU":
            raise TypeError("not an array of numbers or text")
        return numpy.array(self._decode(items), dtype=kind)


def _plain_class(name: str) -> type:
    value = builtins.__dict__[name]
    if not is_plain_class(value):
        raise TypeError("not a class of values")
    plain: type = value
    return plain


def _deque(items: Any) -> object:
    return importlib.import_module("collections").deque(items)


def _from_text(module: str, name: str, text: str) -> object:
    kind = getattr(importlib.import_module(module), name)
    if module == "datetime":
        return kind.fromisoformat(text)
    if len(text) > 10_000:
        raise ValueError("too many digits")
    return kind(text)


def _timedelta(days: int, seconds: int, microseconds: int) -> object:
    return importlib.import_module("datetime").timedelta(days, seconds, microseconds)


_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": _deque,
}
_SCALARS: dict[str, Any] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "range": range,
    "timedelta": _timedelta,
    "Decimal": functools.partial(_from_text, "decimal", "Decimal"),
    "Fraction": functools.partial(_from_text, "fractions", "Fraction"),
    "date": functools.partial(_from_text, "datetime", "date"),
    "datetime": functools.partial(_from_text, "datetime", "datetime"),
    "time": functools.partial(_from_text, "datetime", "time"),
}


def _replace(target: object, content: Any) -> None:
    """Give a container the content that it has after a call in the other process.

    Containers inside it stay the same objects where they have the same place: the test may hold them too.
    """
    if isinstance(target, list) and isinstance(content, list):
        target[:] = [_merge(old, new) for old, new in zip(target, content)] + content[len(target) :]
    elif isinstance(target, dict) and isinstance(content, dict):
        merged = {key: _merge(target.get(key), new) for key, new in content.items()}
        target.clear()
        target.update(merged)
    elif isinstance(target, set) and isinstance(content, set):
        target.clear()
        target.update(content)
    elif isinstance(target, bytearray) and isinstance(content, bytearray):
        target[:] = content


def _merge(old: object, new: object) -> object:
    if isinstance(old, list | dict | set) and type(old) is type(new):
        _replace(old, new)
        return old
    return new


class _Pickler(pickle.Pickler):
    """Replaces stand-ins and functions of the assertions by references."""

    def __init__(self, file: io.BytesIO, program: ProgramCalls):
        super().__init__(file)
        self.program = program

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, StandIn):
            return "object", object.__getattribute__(value, "_number")
        if isinstance(value, FunctionType):
            if value not in self.program.functions:
                self.program.functions.append(value)
            return "function", self.program.functions.index(value)
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__ == MODULE:
            raise NotTrusted(
                f"{UNSUPPORTED} an object of its class {kind.__name__} is given to the program, which has no "
                "such class."
            )
        return None


class StandIn:
    """An object of the program: what is done to it is done there."""

    def __init__(self, program: ProgramCalls, number: int):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> object:
        return _program(self).call(self, arguments, named)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return _program(self).operate("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _program(self).operate("set", self, name, value)

    def __len__(self) -> int:
        return _plain(_program(self).operate("special", self, "__len__", ()), int)

    def __str__(self) -> str:
        return _plain(_program(self).operate("special", self, "__str__", ()), str)

    def __repr__(self) -> str:
        return _plain(_program(self).operate("special", self, "__repr__", ()), str)

    def __contains__(self, item: object) -> bool:
        return _plain(_program(self).operate("special", self, "__contains__", (item,)), bool)

    def __getitem__(self, key: object) -> object:
        return _program(self).operate("special", self, "__getitem__", (key,))

    def __setitem__(self, key: object, value: object) -> None:
        _program(self).operate("special", self, "__setitem__", (key, value))

    def __delitem__(self, key: object) -> None:
        _program(self).operate("special", self, "__delitem__", (key,))

    def __iter__(self) -> object:
        return _program(self).operate("special", self, "__iter__", ())

    def __next__(self) -> object:
        return _program(self).operate("special", self, "__next__", ())

    def _refuse(self, *_: object) -> NoReturn:
        raise NotTrusted("The test compares an object of the program; only values are compared.")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __hash__ = __instancecheck__ = __subclasscheck__ = _refuse


def _program(stand_in: StandIn) -> ProgramCalls:
    program: ProgramCalls = object.__getattribute__(stand_in, "_program")
    return program


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise NotTrusted(
            f"The program returned {type(value).__name__} where Python asks for {kind.__name__}."
        )
    return value
