"""Functions of the caller as functions of a file, so that a command line or another process can load them.

A function of an importable module is named by its file. A function of a script or a notebook is written to a
file in the folder of the run, with what it uses of its surroundings: imports, constants, other functions. A
function that uses more (a closure, an open connection) works in the caller's process only; `Located.problem`
says why.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import math
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

IN_PROCESS = "in_process"
"""Takes the place of a path for a function that has none."""
CONSTANTS = (int, float, complex, str, bytes, bool, type(None))
CONTAINERS = (tuple, list, set, frozenset)


@dataclass(frozen=True)
class Located:
    """Where a function can be loaded from."""

    path: str
    """As custom_reward_function.path takes it: a file, or pkg://module."""
    name: str
    problem: str | None = None
    """Why another process cannot load it."""


class NotWritable(ValueError):
    """A function whose source cannot stand in a file of its own."""


def name_of(function: Callable[..., object]) -> str:
    """The name of a function, for messages and files."""
    return str(getattr(function, "__name__", type(function).__name__))


def locate(function: Callable[..., object], folder: Path) -> Located:
    """Find or write the file of a function; `folder` is for files that are written."""
    name = name_of(function)
    home = _importable_home(function)
    if home is not None:
        return Located(home, name)
    try:
        source = source_with_surroundings(function)
    except NotWritable as problem:
        hint = "Define it at the top level of a file or a notebook cell, with everything that it needs."
        return Located(IN_PROCESS, name, f"{name} exists in this process only: {problem} {hint}")
    return Located(str(write_source(source, folder, name)), name)


def write_source(source: str, folder: Path, name: str) -> Path:
    """Write a Python file under a name that changes with its content."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file = folder / f"{name}-{digest}.py"
    if not file.exists():
        file.write_text(source, encoding="utf-8")
    return file.absolute()


def _importable_home(function: Callable[..., object]) -> str | None:
    """The file or module that defines the function under its own name; None for scripts and notebooks."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return None
    if vars(module).get(name_of(function)) is not function:
        return None
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    if module.__package__:  # it may import its neighbours
        return f"pkg://{module.__name__}"
    return str(Path(file).absolute())


def source_with_surroundings(function: Callable[..., object]) -> str:
    """The source of a function, and of what it uses; NotWritable if that exists in this process only."""
    writer = _SourceWriter()
    writer.add_function(function)
    return writer.text()


class _SourceWriter:
    """Collects the parts of a file."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.constants: dict[str, str] = {}
        self.definitions: dict[str, str] = {}

    def text(self) -> str:
        """The file: imports, constants, definitions, the ones that are used first."""
        parts = ["from __future__ import annotations"]
        parts += self.imports
        parts += [f"{name} = {value}" for name, value in self.constants.items()]
        return "\n".join(parts) + "\n\n" + "\n\n".join(self.definitions.values()) + "\n"

    def add_function(self, function: object) -> None:
        """Add a function or class of a script, and what it uses."""
        name = getattr(function, "__name__", "")
        if not isinstance(function, FunctionType | type) or not str(name).isidentifier():
            raise NotWritable(f"it is {_article(function)}, not a function with a name (def).")
        if isinstance(function, FunctionType) and function.__closure__:
            free = ", ".join(function.__code__.co_freevars)
            raise NotWritable(f"it is defined inside another function and uses {free} of it.")
        source = _class_source(function) if isinstance(function, type) else _source(function)
        tree = ast.parse(source)
        if len(tree.body) != 1 or getattr(tree.body[0], "name", None) != name:
            raise NotWritable("its source is no definition of its own (def or class).")
        self.definitions[name] = ""  # keeps a recursive function from being added twice
        names = vars(sys.modules.get(function.__module__))
        if isinstance(function, FunctionType):
            names = function.__globals__
        for used in _global_names(source, tree):
            if used != name and used in names:
                self._add_name(used, names[used])
            elif used != name and not hasattr(builtins, used) and _is_global(function, used):
                raise NotWritable(f"it uses {used}, which is not defined.")
        del self.definitions[name]
        self.definitions[name] = source.strip()

    def _add_name(self, name: str, value: object) -> None:
        if name in self.definitions or name in self.constants:
            return
        if isinstance(value, ModuleType):
            self.imports[f"import {value.__name__} as {name}"] = None
        elif isinstance(value, re.Pattern):
            self.imports["import re"] = None
            self.constants[name] = f"re.compile({value.pattern!r}, {value.flags})"
        elif _is_constant(value):
            self.constants[name] = repr(value)
        elif _comes_from_a_module(value):
            kind = getattr(value, "__qualname__", name)
            self.imports[f"from {getattr(value, '__module__', '')} import {kind} as {name}"] = None
        elif isinstance(value, FunctionType | type):
            if value.__name__ not in self.definitions:
                self.add_function(value)
            if name != value.__name__:  # another name for it
                self.definitions[name] = f"{name} = {value.__name__}"
        else:
            raise NotWritable(f"it uses {name}, {_article(value)}.")


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise NotWritable(f"the source of {function.__name__} cannot be read ({error}).") from error


def _class_source(kind: type) -> str:
    """The definition of a class. `inspect` does not find it in a notebook; the file of a method does."""
    for value in vars(kind).values():
        if not isinstance(value, FunctionType):
            continue
        text = "".join(linecache.getlines(value.__code__.co_filename))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                return textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
    raise NotWritable(f"the source of the class {kind.__name__} cannot be read.")


def _global_names(source: str, tree: ast.AST) -> list[str]:
    """The names that a definition reads from its surroundings, in the order of their use. Parameters and
    local variables with the name of a global are left out."""
    outside: set[str] = set()
    tables = [symtable.symtable(source, "<definition>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outside |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in outside:
            found[node.id] = None
    return list(found)


def _is_global(function: object, name: str) -> bool:
    """Whether compiled code looks a name up outside of the function."""
    if not isinstance(function, FunctionType):
        return False
    return name in function.__code__.co_names and name not in function.__code__.co_varnames


def _is_constant(value: object) -> bool:
    """Whether Python reads back what it prints for a value; it does not for subclasses (an enum, a Counter, a
    number of numpy)."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if type(value) in CONSTANTS:
        return True
    if isinstance(value, CONTAINERS) and type(value) in CONTAINERS:
        return all(map(_is_constant, value))
    if isinstance(value, dict) and type(value) is dict:
        return all(_is_constant(key) and _is_constant(item) for key, item in value.items())
    return False


def _comes_from_a_module(value: object) -> bool:
    """Whether `from module import name` gives the same object in another process."""
    module = getattr(value, "__module__", None)
    kind = getattr(value, "__qualname__", None)
    if not module or module == "__main__" or not kind or "." in kind:
        return False
    return vars(sys.modules.get(module, builtins)).get(kind) is value


def _article(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[:1].lower() in "aeiou" else f"a {kind}"


def tools_file(tools: Sequence[Located], folder: Path) -> Path:
    """Write the YAML file that names these functions as tools."""
    lines = ["tools:"]
    lines += [f"  - function: {tool.path}:{tool.name}" for tool in tools]
    content = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    file = folder / f"tools-{digest}.yaml"
    file.write_text(content, encoding="utf-8")
    return file.absolute()
