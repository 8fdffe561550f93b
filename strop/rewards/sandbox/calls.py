"""Calls of a program's functions from another process: how values travel, and the side of the program.

Calls arrive as pickles from the trusted process of the assertions (`checker.py`). Replies are lines of JSON
that can only build plain values there: numbers, text, bytes, lists, tuples, sets, dicts, and a few types of
the standard library. Any other object stays here; the reply has its number, and further calls may use it.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import BufferedReader

LENGTH_BYTES = 4
PLAIN = (type(None), bool, str, float)
SMALL = 1 << 53
CONTAINERS = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
OTHER_CLASSES = (int, dict, bytes, complex, range)
Encoded = Any
"""A value as JSON."""


def serve(module: ModuleType, calls: int, replies: int) -> None:
    """Answer calls until the pipe ends."""
    import pickle

    server = _Server(module, replies)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, reference: tuple[str, Any]) -> object:
            return server.resolve(*reference)

    with os.fdopen(calls, "rb") as pipe:
        server.load = lambda: Unpickler(_Frame(pipe)).load()
        server.answer_all()


def is_plain_class(value: object) -> bool:
    """Whether this is a built-in exception, or a class of plain values."""
    if not isinstance(value, type):
        return False
    is_built_in = builtins.__dict__.get(value.__name__) is value
    is_plain = issubclass(value, Exception) or value in (*PLAIN, *CONTAINERS, *OTHER_CLASSES)
    return is_built_in and is_plain


class _Frame:
    """One message of a pipe, as a file that a pickle is read from."""

    def __init__(self, pipe: BufferedReader):
        import io

        size = int.from_bytes(_read_exactly(pipe, LENGTH_BYTES), "big")
        self._content = io.BytesIO(_read_exactly(pipe, size))
        self.read = self._content.read
        self.readline = self._content.readline


def _read_exactly(pipe: BufferedReader, size: int) -> bytes:
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


class _Server:
    """The objects of the program, and the operations on them."""

    load: Callable[[], Any]
    """Read the next message."""

    def __init__(self, module: ModuleType, replies: int):
        self.module = module
        self.replies = replies
        self.objects: list[object] = []
        self.numbers: dict[int, int] = {}

    def answer_all(self) -> None:
        while True:
            try:
                operation, *arguments = self.load()
            except EOFError:
                return
            self.answer(operation, arguments)

    def answer(self, operation: str, arguments: list[Any]) -> None:
        try:
            reply = getattr(self, f"do_{operation}")(*arguments)
        except Exception as error:  # noqa: BLE001 - a program may raise anything; the assertions get it
            reply = {"error": self.encode(type(error)), "message": _text(error)}
        try:
            line = json.dumps(reply)
        except (RecursionError, ValueError, TypeError) as error:
            line = json.dumps({"error": ["builtin", "TypeError"], "message": _text(error)})
        self.send(line)

    def send(self, line: str) -> None:
        content = line.encode() + b"\n"
        while content:
            content = content[os.write(self.replies, content) :]

    def resolve(self, kind: str, value: Any) -> object:
        """Return the object of a reference in a message: one of ours, or a function of the assertions."""
        if kind == "object":
            return self.objects[value]

        def function(*arguments: object) -> object:
            self.send(json.dumps({"callback": value, "arguments": self.encode(list(arguments))}))
            failed, result = self.load()
            if failed:
                raise result
            return result

        return function

    # Operations

    def do_names(self, names: list[str]) -> Encoded:
        """Return those names that the program defines."""
        space = self.module.__dict__
        found = {}
        for name in names:
            if name in space:
                value = space[name]
                found[name] = ["module"] if isinstance(value, ModuleType) else self.encode(value)
        return {"names": found}

    def do_call(self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Encoded:
        """Call an object. Lists, dicts and sets among its arguments return as they are after the call."""
        value = self.encode(target(*arguments, **named))
        changed = []
        for key, argument in [*enumerate(arguments), *named.items()]:
            if isinstance(argument, list | dict | set | bytearray):
                changed.append([key, self.encode(argument)])
        return {"value": value, "changed": changed}

    def do_special(self, target: object, name: str, arguments: tuple[object, ...]) -> Encoded:
        """Call a special method such as __len__; TypeError, as in Python itself, if there is none."""
        if not hasattr(target, name):
            raise TypeError(f"{type(target).__name__!r} object has no {name}")
        return {"value": self.encode(getattr(target, name)(*arguments))}

    def do_get(self, target: object, name: str) -> Encoded:
        return {"value": self.encode(getattr(target, name))}

    def do_set(self, target: object, name: str, value: object) -> Encoded:
        setattr(target, name, value)
        return {"value": None}

    # Values

    def encode(self, value: Any) -> Encoded:
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, int):
            return int(value) if -SMALL < value < SMALL else ["int", hex(value)]
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float(value)
        for base, name in CONTAINERS.items():
            if isinstance(value, base):
                return [name, [self.encode(item) for item in base.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]]
        if isinstance(value, bytes | bytearray):
            return [kind.__name__, bytes(value).hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Encoded:
        kind = type(value)
        origin = (kind.__module__, kind.__name__)
        if origin in (("decimal", "Decimal"), ("fractions", "Fraction")):
            return [kind.__name__, str(value)]
        if origin == ("collections", "deque"):
            return ["deque", [self.encode(item) for item in value]]
        if origin in (("datetime", "date"), ("datetime", "datetime"), ("datetime", "time")):
            return [kind.__name__, value.isoformat()]
        if origin == ("datetime", "timedelta"):
            return ["timedelta", value.days, value.seconds, value.microseconds]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.encode(value.item())
        if numpy is not None and isinstance(value, numpy.ndarray):
            return ["ndarray", value.dtype.str, self.encode(value.tolist())]
        if isinstance(value, type):
            return self._encode_class(value)
        return ["object", self._number(value)]

    def _encode_class(self, value: type) -> Encoded:
        if is_plain_class(value):
            return ["builtin", value.__name__]
        if not issubclass(value, Exception):
            return ["object", self._number(value)]
        base = next(base for base in value.__mro__ if is_plain_class(base))
        return ["exception", self._number(value), value.__name__, base.__name__]

    def _number(self, value: object) -> int:
        """Return the number of an object, which stays alive and keeps it."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # noqa: BLE001 - __str__ of a program's exception may raise anything
        return ""
