"""Reflection over the schema: every key with its type, default, limits and documentation."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Key:
    """One leaf of a configuration."""

    path: str
    type: Any
    default: object
    facts: typing.Mapping[str, Any]
    owner: type

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def inert(self) -> str | None:
        """Why the key changes nothing, or None."""
        return self.facts.get("inert")

    @property
    def doc(self) -> str:
        return field_docs(self.owner).get(self.name, "")


@functools.cache
def hints(kind: type) -> dict[str, Any]:
    """Field types of a dataclass, evaluated in the module of the class that wrote them down."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        written = inspect.get_annotations(base)
        names = vars(sys.modules[base.__module__])
        found.update(
            {
                name: eval(text, dict(names)) if isinstance(text, str) else text
                for name, text in written.items()
            }
        )
    return found


def is_section(kind: object) -> TypeGuard[type]:
    """Whether a type is a section: a dataclass of the schema."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def keys(root: Any, prefix: str = "") -> Iterator[Key]:
    """All leaves below a section (a class, or an instance that carries other defaults), in the order they are
    written."""
    instance = root() if isinstance(root, type) else root
    types_of: dict[str, Any] = hints(type(instance))  # type: ignore[arg-type]
    for field in dataclasses.fields(instance):
        path = f"{prefix}{field.name}"
        value = getattr(instance, field.name)
        if is_section(types_of[field.name]):
            yield from keys(value, f"{path}.")
        else:
            yield Key(path, types_of[field.name], value, field.metadata, type(instance))


def sections(root: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, documentation) of every section below a root."""
    types_of = hints(root)
    for field in dataclasses.fields(root):
        kind = types_of[field.name]
        if is_section(kind):
            yield f"{prefix}{field.name}", field_docs(root).get(field.name, "")
            yield from sections(kind, f"{prefix}{field.name}.")


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The string literals under the fields of a dataclass, its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_class_docs(base.__module__).get(base.__name__, {}))
    return docs


@functools.cache
def _class_docs(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                before.target.id: " ".join(after.value.value.split())
                for before, after in zip(node.body, node.body[1:])
                if isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            }
    return found


def type_name(kind: object) -> str:
    """A type in words, for messages: "whole number", "a list of texts"."""
    if kind is Any:
        return "anything"
    if kind is type(None):
        return "null"
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(type_name(k) for k in typing.get_args(kind))
    origin = typing.get_origin(kind)
    if origin is list:
        return f"a list of {type_name(typing.get_args(kind)[0])}s"
    if origin is dict:
        return "a mapping"
    words: dict[object, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return words.get(kind, str(kind))
