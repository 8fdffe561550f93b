"""Read a pickle without running anything: an interpreter of the opcodes that describe plain data.

Python's unpickler calls what a pickle names. This one does not import and does not call by name: every name
is looked up in a table of the caller, and only an entry of that table can be called. Opcodes that saved
weights do not use are refused, so are keys of dictionaries other than text, numbers and records. The
interpreter does not recurse, and it holds no more objects than the pickle has opcodes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NamedFunction:
    """A function that a pickle may call; it is given the arguments as they are and must check them."""

    call: Callable[[tuple[object, ...]], object]


@dataclass(frozen=True)
class NamedClass:
    """A class that a pickle may name; its instances are PickledObjects."""

    name: str


@dataclass(eq=False)
class PickledObject:
    """An instance of a named class: its arguments and attributes, without its methods."""

    kind: str
    arguments: tuple[object, ...] = ()
    attributes: dict[str, object] = field(default_factory=dict)
    state: tuple[object, ...] = ()
    """A saved state that is a tuple."""

    def set_state(self, state: object) -> None:
        """Take over attributes from a saved state: a dictionary, or a tuple of dictionaries."""
        self.state = state if isinstance(state, tuple) else ()
        for values in self.state or (state,):
            if isinstance(values, dict):
                for name, value in values.items():
                    self.attributes[str(name)] = value


FindName = Callable[[str, str], object]
"""What stands for (module, name); a ValueError refuses it."""
FindPersistent = Callable[[object], object]
"""What stands for a persistent id."""

_VALUES = (
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINUNICODE",
    "BINBYTES",
    "BINBYTES8",
    "SHORT_BINBYTES",
)
"""Opcodes whose argument is the value."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = ("PROTO", "FRAME", "STOP")


def read_pickle(data: bytes, find: FindName, persistent: FindPersistent) -> object:
    """The content of a pickle; ValueError if it is damaged, or holds more than plain data."""
    reader = _Interpreter(find, persistent)
    for opcode, argument, _ in pickletools.genops(data):
        reader.step(opcode.name, argument)
    if len(reader.stack) != 1 or reader.marks:
        raise ValueError("the pickle ends with unfinished objects")
    return reader.stack[0]


class _Interpreter:
    def __init__(self, find: FindName, persistent: FindPersistent) -> None:
        self.find = find
        self.persistent = persistent
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[object, object] = {}
        self._steps: dict[str, Callable[[object], None]] = {
            "MARK": self._mark,
            "POP": self._drop,
            "POP_MARK": self._drop_marked,
            "TUPLE": self._tuple,
            "EMPTY_LIST": self._list,
            "EMPTY_DICT": self._dict,
            "APPEND": self._append,
            "APPENDS": self._extend,
            "SETITEM": self._set_item,
            "SETITEMS": self._set_items,
            "BINGET": self._get,
            "LONG_BINGET": self._get,
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "MEMOIZE": self._memoize,
            "GLOBAL": self._name,
            "STACK_GLOBAL": self._name_on_stack,
            "REDUCE": self._call,
            "NEWOBJ": self._new_object,
            "BUILD": self._set_state,
            "BINPERSID": self._persistent,
        }

    def step(self, name: str, argument: object) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(tuple(self._take(_TUPLES[name])))
        elif name in self._steps:
            self._steps[name](argument)
        elif name not in _IGNORED:
            raise ValueError(f"the pickle uses {name}, which saved weights do not need")

    def _take(self, count: int) -> list[object]:
        """Remove the last `count` objects from the stack."""
        if len(self.stack) < count:
            raise ValueError("the pickle uses an object that it has not made")
        start = len(self.stack) - count
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def _take_marked(self) -> list[object]:
        """Remove the objects behind the last mark."""
        if not self.marks or self.marks[-1] > len(self.stack):
            raise ValueError("the pickle ends a group that it has not begun")
        return self._take(len(self.stack) - self.marks.pop())

    def _last(self) -> object:
        if not self.stack:
            raise ValueError("the pickle uses an object that it has not made")
        return self.stack[-1]

    def _mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def _drop(self, _: object) -> None:
        self._take(1)

    def _drop_marked(self, _: object) -> None:
        self._take_marked()

    def _tuple(self, _: object) -> None:
        items = self._take_marked()
        self.stack.append(tuple(items))

    def _list(self, _: object) -> None:
        self.stack.append([])

    def _dict(self, _: object) -> None:
        self.stack.append({})

    def _append(self, _: object) -> None:
        self._append_all(self._take(1))

    def _extend(self, _: object) -> None:
        self._append_all(self._take_marked())

    def _append_all(self, items: list[object]) -> None:
        target = self._last()
        if not isinstance(target, list):
            raise ValueError(f"the pickle appends to a {type(target).__name__}")
        target.extend(items)

    def _set_item(self, _: object) -> None:
        self._set_all(self._take(2))

    def _set_items(self, _: object) -> None:
        self._set_all(self._take_marked())

    def _set_all(self, items: list[object]) -> None:
        target = self._last()
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"the pickle sets {len(items)} keys and values of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | PickledObject | None):
                raise ValueError(f"the pickle has a {type(key).__name__} as the key of a dictionary")
            target[key] = value

    def _get(self, place: object) -> None:
        if place not in self.memo:
            raise ValueError("the pickle refers to an object that it has not made")
        self.stack.append(self.memo[place])

    def _put(self, place: object) -> None:
        self.memo[place] = self._last()

    def _memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self._last()

    def _name(self, argument: object) -> None:
        module, _, name = str(argument).partition(" ")
        self.stack.append(self.find(module, name))

    def _name_on_stack(self, _: object) -> None:
        module, name = self._take(2)
        self.stack.append(self.find(str(module), str(name)))

    def _call(self, _: object) -> None:
        function, arguments = self._take(2)
        self.stack.append(call(function, arguments))

    def _new_object(self, _: object) -> None:
        kind, arguments = self._take(2)
        if not isinstance(kind, NamedClass):
            raise ValueError(f"the pickle makes an instance of a {type(kind).__name__}")
        self.stack.append(call(kind, arguments))

    def _set_state(self, _: object) -> None:
        (state,) = self._take(1)
        target = self._last()
        if isinstance(target, PickledObject):
            target.set_state(state)
        elif not isinstance(target, dict):  # the attributes of a dictionary are not needed
            raise ValueError(f"the pickle sets attributes of a {type(target).__name__}")

    def _persistent(self, _: object) -> None:
        (name,) = self._take(1)
        self.stack.append(self.persistent(name))


def call(function: object, arguments: object) -> object:
    """Call a function of the table, or make an instance of one of its classes."""
    if not isinstance(arguments, tuple):
        raise ValueError(f"the pickle calls with a {type(arguments).__name__} instead of arguments")
    if isinstance(function, NamedFunction):
        return function.call(arguments)
    if isinstance(function, NamedClass):
        return PickledObject(function.name, arguments)
    raise ValueError(f"the pickle calls a {type(function).__name__}")
