"""Arguments of a call, checked against the tool's JSON schema: the part of JSON schema that tools use.

Error messages are written for the model, which reads them and may call again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from strop.agents.parsers.base import Raw, kind_of
from strop.agents.tool_schema import JsonObject, JsonSchema
from strop.registry import did_you_mean

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def fit_arguments(arguments: Mapping[str, object], schema: JsonSchema) -> JsonObject:
    """Return the arguments with raw text converted to its type and 3.0 to 3; ValueError lists everything that
    does not fit."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    problems = [f"argument {name!r} is missing" for name in required if name not in arguments]
    result: JsonObject = {}
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


def _fit(value: object, schema: object, where: str) -> object:
    """Return the value, converted where needed; ValueError when it does not fit. `where` names it."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, Raw):
        value = _convert(value, schema)
    if value is None and schema.get("nullable"):
        return None
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return _fit_one_of(value, choices, where)
    kinds = _kinds(schema)
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        raise ValueError(f"{where} must be {_with_article(kinds)}, not {kind_of(value)} ({_shown(value)})")
    if "integer" in kinds and isinstance(value, float):
        value = int(value)
    if schema.get("enum") and value not in schema["enum"]:
        raise ValueError(
            f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {_shown(value)}"
        )
    if isinstance(value, list) and "items" in schema:
        return [_fit(item, schema["items"], f"item {place} of {where}") for place, item in enumerate(value)]
    if isinstance(value, dict) and schema.get("properties"):
        try:
            return fit_arguments(value, schema)
        except ValueError as error:
            raise ValueError(f"in {where}: {error}") from error
    return value


def _fit_one_of(value: object, choices: Sequence[object], where: str) -> object:
    problems = []
    for schema in choices:
        try:
            return _fit(value, schema, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(" or ".join(problems))


def _kinds(schema: JsonSchema) -> list[str]:
    """Return the types that a schema allows; none means any."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    return list(kinds or [])


def _convert(text: Raw, schema: JsonSchema) -> object:
    """Return what bare text means where the schema wants something else than text."""
    wanted = set(_kinds(schema))
    for form in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        if isinstance(form, Mapping) and isinstance(form.get("type"), str):
            wanted.add(form["type"])
    if not wanted or wanted == {"string"}:
        return str(text)
    try:
        value = json.loads(_PYTHON_WORDS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return str(text)
    fits = any(_has_type(value, kind) for kind in wanted) or (value is None and schema.get("nullable"))
    if fits or "string" not in wanted:
        return value
    return str(text)


def _has_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return math.isfinite(value) and value.is_integer()
    return isinstance(value, _PYTHON_TYPES.get(kind, (object,)))


def _with_article(kinds: Sequence[str]) -> str:
    named = []
    for kind in kinds:
        if kind == "null":
            named.append(kind)
        elif kind[0] in "aeio":
            named.append(f"an {kind}")
        else:
            named.append(f"a {kind}")
    return " or ".join(named)


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return text[: MAX_SHOWN - 3] + "..."
