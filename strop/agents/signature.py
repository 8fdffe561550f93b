"""The JSON schema of a Python function, from its type hints and its docstring.

def weather(city: str, days: int = 1) -> str:
    \"\"\"Forecast for a city.

    Args:
        city: Name of the city.
        days: How many days ahead.
    \"\"\"
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from strop.agents.tool_schema import ToolSchema

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", tuple: "array"}
_PARAMETER = re.compile(r"^(?P<indent>[ \t]+)(?::param\s+)?\*{0,2}(?P<name>\w+)\s*(?:\([^)\n]*\))?\s*:\s*(?P<text>.*)$")
_SECTION = re.compile(r"^(args|arguments|parameters|params|returns?|raises|yields?|examples?|notes?)\s*:\s*$", re.IGNORECASE)


def schema_of(function: Callable[..., Any]) -> ToolSchema:
    """What the model is told about `function`; parameters without a type, or that cannot be named, are a ValueError."""
    name = getattr(function, "__name__", type(function).__name__)
    where = f"The tool function {name!r}"
    try:
        hints = get_type_hints(function)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"{where} has type hints that cannot be read: {error}.") from error
    description, documented = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{where} takes {parameter}, but a model gives every argument by name. Spell the parameters out.")
        if parameter.name not in hints:
            raise ValueError(
                f"{where} has a parameter {parameter.name!r} without a type; write for instance `{parameter.name}: str`."
            )
        properties[parameter.name] = json_type(hints[parameter.name], f"{where}, parameter {parameter.name!r}")
        if parameter.name in documented:
            properties[parameter.name]["description"] = documented[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": required})


def json_type(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {_PLAIN.get(type(choice)) for choice in inner}
        kind = {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}
        return {**kind, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        forms = [json_type(form, where) for form in inner if form is not type(None)]
        nullable = type(None) in inner
        if len(forms) == 1:
            return {**forms[0], **({"nullable": True} if nullable else {})}
        return {"anyOf": [*forms, *([{"type": "null"}] if nullable else [])]}
    if origin is tuple:
        return {"type": "array"} if not inner else {"type": "array", "items": json_type(inner[0], where)}
    if origin in (list, set, Sequence):
        return {"type": "array", "items": json_type(inner[0], where)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": json_type(inner[1], where)}
    raise ValueError(
        f"{where} has the type {hint!r}, which has no form in JSON. Use str, int, float, bool, list[...], dict[str, ...], "
        "Literal[...] or a union of them."
    )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description (the text before the first section), and what `Args:` (or :param x:) says of each parameter."""
    description: list[str] = []
    documented: dict[str, str] = {}
    section, current, indent = "", "", ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current = heading.group(1).lower(), ""
        elif line.startswith(":param"):
            section = "args"
            found = _PARAMETER.match(" " + line)
            if found:
                current = found["name"]
                documented[current] = found["text"].strip()
        elif line.startswith((":return", ":raise")):
            section, current = "other", ""
        elif not section:
            description.append(line.strip())
        elif section.startswith(("arg", "param")):
            found = _PARAMETER.match(line)
            if found and (not current or found["indent"] == indent):
                current, indent = found["name"], found["indent"]
                documented[current] = found["text"].strip()
            elif current and line.strip():
                documented[current] = f"{documented[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), documented
