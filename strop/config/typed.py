"""Builds typed dataclasses from a plain tree of values, or reports every wrong value at once."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import SequenceMatcher
from typing import Any, TypeVar

from strop.config.schema.reflect import hints, is_section, keys, type_name
from strop.registry import Registry, did_you_mean, nearest

Kind = TypeVar("Kind")


class ConfigError(ValueError):
    """What is wrong with a configuration: one line per problem."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


def build(kind: type[Kind], tree: Mapping[str, object]) -> Kind:
    """An instance of the dataclass `kind` from a resolved tree. Raises ConfigError with all problems at
    once."""
    problems: list[str] = []
    made = _section(kind, tree, "", problems, kind)
    if problems or not isinstance(made, kind):
        raise ConfigError(problems)
    return made


def _section(kind: type, tree: object, path: str, problems: list[str], root: type) -> object:
    if not isinstance(tree, Mapping):
        problems.append(
            f"{path.rstrip('.')}: expected a section with keys such as {_some(kind)}, got {tree!r}."
        )
        return None
    types_of = hints(kind)
    for name in tree:
        if name not in types_of:
            problems.append(unknown_key(f"{path}{name}", root))
    values: dict[str, object] = {}
    for field in fields(kind):
        where = f"{path}{field.name}"
        wanted = types_of[field.name]
        if field.name not in tree:
            if field.default is MISSING and field.default_factory is MISSING:
                problems.append(f"{where} is not set.")
            continue
        value = tree[field.name]
        if is_section(wanted):
            values[field.name] = _section(
                wanted, value if value is not None else {}, f"{where}.", problems, root
            )
        else:
            values[field.name] = _leaf(wanted, value, where, field.metadata, problems)
    return None if problems else kind(**values)


def _leaf(
    wanted: object, value: object, where: str, facts: Mapping[str, object], problems: list[str]
) -> object:
    try:
        value = convert(wanted, value)
    except (TypeError, ValueError):
        problems.append(f"{where}: expected {type_name(wanted)}, got {value!r}.")
        return None
    problem = limit_broken(value, facts)
    if problem:
        problems.append(f"{where}: {problem}")
    return value


def convert(wanted: object, value: object) -> object:
    """`value` as the wanted type; TypeError or ValueError if it is not one. Numbers written as text count as
    numbers."""
    if wanted is Any:
        return value
    if isinstance(wanted, types.UnionType):
        return _convert_union(wanted, value)
    origin = typing.get_origin(wanted)
    if origin is list:
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            value = [item.strip() for item in value[1:-1].split(",") if item.strip()]
        if not isinstance(value, list | tuple):
            raise TypeError(value)
        return [convert(typing.get_args(wanted)[0], item) for item in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(value)
        return dict(value)
    if wanted is type(None):
        if value is not None:
            raise TypeError(value)
        return None
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise TypeError(value)
    if wanted is str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError(value)
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    if wanted is int and isinstance(value, int):
        return value
    try:
        number = float(value)
        if wanted is float:
            return number
        whole = int(number)
    except OverflowError as error:  # infinity, or a whole number of hundreds of digits
        raise TypeError(value) from error
    if number != whole:
        raise TypeError(value)
    return whole


def accepts_null(wanted: object) -> bool:
    """Whether null is a value of the type."""
    return wanted is Any or type(None) in typing.get_args(wanted)


def _convert_union(wanted: object, value: object) -> object:
    options = typing.get_args(wanted)
    exact = [o for o in options if (typing.get_origin(o) or o) is type(value)]
    for option in [*exact, *options]:
        try:
            return convert(option, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(value)


def limit_broken(value: object, facts: Mapping[str, Any]) -> str | None:
    """Which limit of a field a value breaks, in words."""
    choices = facts.get("choices")
    registry = facts.get("one_of")
    if choices is not None:
        for item in value if isinstance(value, list) else [value]:
            if item not in choices:
                listed = ", ".join("null" if c is None else str(c) for c in choices)
                hint = did_you_mean(str(item), [str(c) for c in choices])
                return f"{item!r} is not one of: {listed}.{hint}"
    if isinstance(registry, Registry) and isinstance(value, str) and value not in registry:
        try:
            registry.entry(value)
        except ValueError as error:
            return str(error)
    if isinstance(value, int | float) and not isinstance(value, bool):
        for name, words, broken in (
            ("at_least", "at least", lambda v, limit: not v >= limit),
            ("above", "above", lambda v, limit: not v > limit),
            ("at_most", "at most", lambda v, limit: not v <= limit),
        ):
            limit = facts.get(name)
            if limit is not None and broken(value, limit):
                return f"must be {words} {limit}, got {value}."
    return None


def unknown_key(path: str, root: type) -> str:
    """The message for a key that does not exist: the nearest ones by name, wherever they live."""
    known = [key.path for key in keys(root)]
    name = path.rpartition(".")[2]
    close = [p for p in known if p.rpartition(".")[2] == name] + nearest(path, known)
    close = sorted(
        set(close), key=lambda p: (not p.endswith(f".{path}"), -SequenceMatcher(None, path, p).ratio(), p)
    )
    if not close:
        names = {p.rpartition(".")[2]: p for p in known}
        close = [names[n] for n in nearest(name, names)]
    hint = f" Did you mean {' or '.join(close[:3])}?" if close else ""
    return f"{path}: no such key.{hint}"


def _some(kind: type) -> str:
    return ", ".join(field.name for field in fields(kind)[:3])
