"""Arguments of a call against the tool's JSON schema: the part of JSON schema that tools use, with words for the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from strop.agents.calls import Raw
from strop.agents.parsers.base import kind_of
from strop.registry import did_you_mean

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def fitted(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with raw text given its type and 3.0 taken for 3; ValueError lists everything that does not fit."""
    properties = schema.get("properties") or {}
    problems = [f"argument {name!r} is missing" for name in schema.get("required") or [] if name not in arguments]
    result = {}
    open_ended = schema.get("additionalProperties", not properties)
    for name, value in arguments.items():
        if name in properties:
            try:
                result[name] = _fit(value, properties[name], f"argument {name!r}")
            except ValueError as error:
                problems.append(str(error))
        elif open_ended:
            result[name] = str(value) if isinstance(value, Raw) else value
        else:
            takes = f"it takes {', '.join(properties)}" if properties else "it takes none"
            problems.append(f"there is no argument {name!r}.{did_you_mean(name, properties)} ({takes})")
    if problems:
        raise ValueError("; ".join(problems))
    return result


def _fit(value: Any, schema: Any, where: str) -> Any:
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, Raw):
        value = _typed(value, schema)
    if value is None and schema.get("nullable"):
        return None
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return _fit_one(value, choices, where)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds or [])
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise ValueError(f"{where} must be {_named(kinds)}, not {kind_of(value)} ({_shown(value)})")
    if "integer" in kinds and isinstance(value, float):
        value = int(value)
    if schema.get("enum") and value not in schema["enum"]:
        raise ValueError(f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {_shown(value)}")
    if isinstance(value, list) and "items" in schema:
        return [_fit(item, schema["items"], f"item {place} of {where}") for place, item in enumerate(value)]
    if isinstance(value, dict) and schema.get("properties"):
        try:
            return fitted(value, schema)
        except ValueError as error:
            raise ValueError(f"in {where}: {error}") from error
    return value


def _fit_one(value: Any, choices: list[Any], where: str) -> Any:
    problems = []
    for schema in choices:
        try:
            return _fit(value, schema, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(" or ".join(problems))


def _typed(text: Raw, schema: Mapping[str, Any]) -> Any:
    """What bare text means where the schema wants something else than text."""
    kinds = schema.get("type")
    wanted = {kinds} if isinstance(kinds, str) else set(kinds or [])
    for form in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        if isinstance(form, Mapping) and isinstance(form.get("type"), str):
            wanted.add(form["type"])
    if not wanted or wanted == {"string"}:
        return str(text)
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return str(text)
    fits = any(_is(value, kind) for kind in wanted) or (value is None and schema.get("nullable"))
    return value if fits or "string" not in wanted else str(text)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return math.isfinite(value) and value.is_integer()
    return isinstance(value, _KINDS.get(kind, (object,)))


def _named(kinds: list[str]) -> str:
    return " or ".join(f"{'an' if kind[0] in 'aeio' else 'a'} {kind}" if kind != "null" else kind for kind in kinds)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
