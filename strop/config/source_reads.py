"""Finds the configuration keys that a source file reads, by its syntax tree. `config.readers` uses it.

The section that an expression stands for comes from the annotation of its variable, from the assignment that
made it, or from its own name: `config.trainer` is a trainer section, and so is a parameter `trainer` without
a type.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from strop.config.schema import ROOTS
from strop.config.schema.reflect import hints, is_section


class Section(NamedTuple):
    """A section class, and the root class it was reached from where that is known."""

    kind: type
    root: type | None = None


Sections = frozenset[Section] | None
"""The sections that an expression may be. Empty: certainly none. None: unknown."""
NO_SECTION: Sections = frozenset()


@dataclass(frozen=True)
class Read:
    """An access to an attribute `name` of a section, in the file `path` (relative to the package)."""

    path: str
    name: str
    sections: Sections


def reads_of(path: str, source: str, index: SchemaIndex) -> Iterator[Read]:
    """The reads in one file."""
    visitor = _Visitor(path, index)
    module = ast.parse(source)
    if "getattr(" in source:
        visitor.loop_names = _loops_over_strings(module)
    if reads_whole_sections(source):
        visitor.whole_readers = _readers_of_whole_sections(module)
    visitor.visit(module)
    yield from visitor.reads


def reads_whole_sections(source: str) -> bool:
    """Whether the code may read every field of a section, without naming them."""
    return "asdict(" in source or "vars(" in source


class SchemaIndex:
    """Section classes by class name, and by the name of the field that holds them."""

    def __init__(self) -> None:
        self.by_class: dict[str, type] = {}
        self.by_field: dict[str, set[Section]] = defaultdict(set)
        self.roots: set[type] = set()
        for root in ROOTS.values():
            self.roots.update(root.__mro__)
            self._add(root)

    def _add(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_section(base):
                self.by_class[base.__name__] = base
        for name, section in hints(kind).items():
            if is_section(section):
                self.by_field[name].add(Section(section))
                self._add(section)

    def field(self, sections: Iterable[Section], name: str) -> Sections:
        """What the field `name` of any of these sections holds."""
        found: set[Section] = set()
        for section in sections:
            kind = hints(section.kind).get(name)
            if kind is not None and is_section(kind):
                found.add(Section(kind, section.root))
        return frozenset(found)

    def named(self, name: str) -> Sections:
        """The sections that a field of this name holds somewhere in the schema; None where there is none."""
        return frozenset(self.by_field[name]) if name in self.by_field else None

    def annotation(self, node: ast.expr) -> Sections:
        """The section classes that an annotation mentions. None: it says nothing (Any, object)."""
        found: set[Section] = set()
        names: set[str] = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                names.add(part.id)
            elif isinstance(part, ast.Attribute):
                names.add(part.attr)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                names.add(part.value)
        for alias in names & UNIONS.keys():
            names |= UNIONS[alias]
        for name in names:
            kind = self.by_class.get(name)
            if kind is not None:
                found.add(Section(kind, kind if kind in self.roots else None))
        if found:
            return frozenset(found)
        # An unknown name such as ProfiledConfig may be a union of sections that another module defines.
        if names & UNTYPED or any(name.endswith("Config") for name in names):
            return None
        return NO_SECTION


_SUPERVISED_CONFIGS = {"SftConfig", "RmConfig", "DpoConfig"}
UNIONS = {
    "AnySupervisedConfig": _SUPERVISED_CONFIGS,
    "TrainingConfig": {"PpoConfig", *_SUPERVISED_CONFIGS},
    "DevicePool": {
        "RolloutConfig",
        "RefConfig",
        "CriticConfig",
        "RewardModelConfig",
        "DistillationConfig",
        "TrainerConfig",
    },
}
"""Names for several classes of the schema (config.schema.roots and config.derived)."""
UNTYPED = {"Any", "object", "Loaded", "RootConfig"}
"""Annotations that leave open which section a value is."""


class _Visitor(ast.NodeVisitor):
    """Collects the reads of one module, with the sections that its names stand for."""

    def __init__(self, path: str, index: SchemaIndex) -> None:
        self.path = path
        self.index = index
        self.reads: list[Read] = []
        self.scopes: list[dict[str, Sections]] = [{}]
        self.attributes: list[dict[str, Sections]] = []  # of `self`, per class that encloses the code
        self.loop_names: dict[str, list[str]] = {}  # loop variable -> the strings that it takes
        self.whole_readers: set[str] = set()  # functions that read every field of their first argument

    # --- Scopes ---

    def visit_Module(self, node: ast.Module) -> None:
        self._bind_statements(node)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        fields: dict[str, Sections] = {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = self.index.annotation(statement.annotation)
        self.attributes.append(fields)
        for method in node.body:  # `self.config = config` in one method is read in another
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                self._bind_self(method, fields)
        self.generic_visit(node)
        self.attributes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scopes.append(self._parameters(node.args))
        self._bind_statements(node)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def _parameters(self, arguments: ast.arguments) -> dict[str, Sections]:
        scope: dict[str, Sections] = {}
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            sections: Sections = None
            if argument.annotation is not None:
                sections = self.index.annotation(argument.annotation)
            scope[argument.arg] = self.index.named(argument.arg) if sections is None else sections
        return scope

    def _bind_self(self, method: ast.FunctionDef | ast.AsyncFunctionDef, fields: dict[str, Sections]) -> None:
        self.scopes.append(self._parameters(method.args))
        self._bind_statements(method)
        for target, value in _assignments(method):
            if isinstance(target, ast.Attribute) and _is_self(target.value):
                fields.setdefault(target.attr, self.resolve(value))
        self.scopes.pop()

    def _bind_statements(self, node: ast.AST) -> None:
        """Note what the names that are assigned in this scope stand for."""
        scope = self.scopes[-1]
        for part in _own_statements(node):
            if isinstance(part, ast.Import | ast.ImportFrom):
                for alias in part.names:
                    scope[(alias.asname or alias.name).partition(".")[0]] = NO_SECTION
        for target, value in _assignments(node):
            if isinstance(target, ast.Name):
                scope[target.id] = self.resolve(value)

    # --- Expressions ---

    def resolve(self, node: ast.expr) -> Sections:
        """The sections that an expression may be."""
        if isinstance(node, ast.Name):
            for scope in reversed(self.scopes):
                if node.id in scope:
                    return scope[node.id]
            return None
        if isinstance(node, ast.Attribute):
            return self._resolve_attribute(node)
        if isinstance(node, ast.Call):
            return self._resolve_getattr(node)
        if isinstance(node, ast.IfExp):
            return _either(self.resolve(node.body), self.resolve(node.orelse))
        if isinstance(node, ast.BoolOp):
            return self.resolve(node.values[0])
        if isinstance(node, ast.Constant):
            return NO_SECTION
        return None

    def _resolve_getattr(self, node: ast.Call) -> Sections:
        name = _getattr_name(node)
        if name is None:
            return None
        return self._resolve_attribute(ast.Attribute(node.args[0], name, ast.Load()))

    def _resolve_attribute(self, node: ast.Attribute) -> Sections:
        if _is_self(node.value) and self.attributes:
            fields = self.attributes[-1]
            return fields[node.attr] if node.attr in fields else self.index.named(node.attr)
        below = self.resolve(node.value)
        if below is None:
            return self.index.named(node.attr)
        if node.attr == "config":  # Loaded[PpoConfig].config
            return below
        return self.index.field(below, node.attr)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and not _is_self(node.value):
            self._note(node.attr, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _getattr_name(node)
        if name is not None:
            self._note(name, node.args[0])
        elif _is_getattr(node) and isinstance(node.args[1], ast.Name):
            for name in self.loop_names.get(node.args[1].id, ()):
                self._note(name, node.args[0])
        else:
            self._note_strings(node.args)
        whole = isinstance(node.func, ast.Name) and node.func.id in self.whole_readers
        if node.args and (whole or _is_asdict(node.func)):
            self._note_all_fields(node.args[0])
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._note_strings(node.elts)
        self.generic_visit(node)

    def _note_strings(self, nodes: Iterable[ast.expr]) -> None:
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                self.reads.append(Read(self.path, node.value, None))

    def _note(self, name: str, value: ast.expr) -> None:
        sections = self.resolve(value)
        if sections is None or sections:
            self.reads.append(Read(self.path, name, sections))

    def _note_all_fields(self, value: ast.expr) -> None:
        """asdict(section) and vars(section) read every key of a section; of a whole configuration, none."""
        sections = self.resolve(value) or frozenset()
        for section in sections:
            if section.kind in self.index.roots or not is_section(section.kind):
                continue
            for name in hints(section.kind):
                self.reads.append(Read(self.path, name, frozenset({section})))


def _getattr_name(node: ast.Call) -> str | None:
    """The name in `getattr(x, "name")`, or None."""
    if not _is_getattr(node):
        return None
    name = node.args[1]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _is_getattr(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1


def _loops_over_strings(module: ast.Module) -> dict[str, list[str]]:
    """Loop variable -> strings, for `for name in NAMES` where NAMES is a tuple of strings of the module."""
    tuples: dict[str, list[str]] = {}
    for target, value in _assignments(module):
        if isinstance(target, ast.Name) and isinstance(value, ast.Tuple):
            tuples[target.id] = _strings(value)
    found: dict[str, list[str]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            names = _strings(node.iter)
            if isinstance(node.iter, ast.Name):
                names = tuples.get(node.iter.id, [])
            found.setdefault(node.target.id, []).extend(names)
    return found


def _readers_of_whole_sections(module: ast.Module) -> set[str]:
    """Functions of the module that call vars() or asdict() on their first parameter."""
    found: set[str] = set()
    for function in module.body:
        if not isinstance(function, ast.FunctionDef) or not function.args.args:
            continue
        first = function.args.args[0].arg
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and _is_asdict(node.func) and node.args):
                continue
            argument = node.args[0]
            if isinstance(argument, ast.Name) and argument.id == first:
                found.add(function.name)
    return found


def _strings(node: ast.expr) -> list[str]:
    """The strings in a tuple."""
    found = []
    for element in getattr(node, "elts", ()):
        if isinstance(element, ast.Constant) and isinstance(element.value, str):
            found.append(element.value)
    return found


def _either(one: Sections, other: Sections) -> Sections:
    if one is None or other is None:
        return one or other
    return one | other


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_asdict(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("asdict", "vars")


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a scope in their order, without those of the functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _own_statements(child)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment of a scope; `a, b = x, y` counts as two."""
    for part in _own_statements(node):
        if isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Tuple) and isinstance(part.value, ast.Tuple):
                    yield from zip(target.elts, part.value.elts)
                else:
                    yield target, part.value
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            yield part.target, part.value
