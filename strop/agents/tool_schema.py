"""The JSON schema of a tool: what the model reads about it. It is given, or made from a Python function.

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
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

JsonObject = dict[str, Any]
"""A JSON object, such as the arguments of a call."""
JsonSchema = Mapping[str, Any]
"""The JSON schema of a value."""

_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    tuple: "array",
}
_PARAMETER = re.compile(
    r"^(?P<indent>[ \t]+)(?::param\s+)?\*{0,2}(?P<name>\w+)\s*(?:\([^)\n]*\))?\s*:\s*(?P<text>.*)$"
)
_SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns?|raises|yields?|examples?|notes?)\s*:\s*$", re.IGNORECASE
)


@dataclass(frozen=True)
class ToolSchema:
    """Name, description and parameters of a tool."""

    name: str
    description: str
    parameters: JsonObject
    """JSON schema of an object: {"type": "object", "properties": {...}, "required": [...]}."""

    def as_openai(self) -> JsonObject:
        """Return the schema in OpenAI's form, which chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @classmethod
    def from_openai(cls, schema: object, where: str) -> ToolSchema:
        """Read {"type": "function", "function": {name, description, parameters}}; errors name `where`."""
        function = schema.get("function") if isinstance(schema, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValueError(
                f"{where} needs a schema of the form {{type: function, function: {{name, description, "
                f"parameters}}}}, not {schema!r}."
            )
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        properties = parameters.get("properties") or {}
        if parameters.get("type", "object") != "object" or not isinstance(properties, Mapping):
            raise ValueError(
                f"The parameters of tool {name!r} of {where} must be the schema of an object, {{type: "
                f"object, properties: {{...}}, required: [...]}}, not {parameters!r}."
            )
        parameters = {"type": "object", **parameters, "properties": dict(properties)}
        return cls(name, str(function.get("description") or ""), parameters)


def schema_of(function: Callable[..., object]) -> ToolSchema:
    """Return the schema of a function, from its type hints and its docstring.

    A parameter without a type, or one that cannot be given by name, is a ValueError.
    """
    name = getattr(function, "__name__", type(function).__name__)
    where = f"The tool function {name!r}"
    try:
        hints = get_type_hints(function)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"{where} has type hints that cannot be read: {error}.") from error
    description, documented = read_docstring(inspect.getdoc(function) or "")
    properties: JsonObject = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"{where} takes {parameter}, but a model gives every argument by name. Spell the parameters "
                "out."
            )
        if parameter.name not in hints:
            raise ValueError(
                f"{where} has a parameter {parameter.name!r} without a type; write for instance "
                f"`{parameter.name}: str`."
            )
        schema = json_type(hints[parameter.name], f"{where}, parameter {parameter.name!r}")
        if parameter.name in documented:
            schema["description"] = documented[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": required})


def json_type(hint: object, where: str) -> JsonObject:
    """Return the JSON schema of a type hint."""
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is Literal:
        return _literal_type(inner)
    if origin in (Union, types.UnionType):
        return _union_type(inner, where)
    if origin is tuple and not inner:
        return {"type": "array"}
    if origin in (tuple, list, set, Sequence):
        return {"type": "array", "items": json_type(inner[0], where)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": json_type(inner[1], where)}
    raise ValueError(
        f"{where} has the type {hint!r}, which has no form in JSON. Use str, int, float, bool, list[...], "
        "dict[str, ...], Literal[...] or a union of them."
    )


def _literal_type(choices: tuple[object, ...]) -> JsonObject:
    kinds = {_JSON_TYPES.get(type(choice)) for choice in choices}
    if len(kinds) == 1 and None not in kinds:
        return {"type": kinds.pop(), "enum": list(choices)}
    return {"enum": list(choices)}


def _union_type(members: tuple[object, ...], where: str) -> JsonObject:
    forms = [json_type(member, where) for member in members if member is not type(None)]
    nullable = type(None) in members
    if len(forms) == 1:
        return {**forms[0], "nullable": True} if nullable else forms[0]
    if nullable:
        forms.append({"type": "null"})
    return {"anyOf": forms}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description (the text before the first section), and what `Args:` (or :param x:) says of
    each parameter."""
    description: list[str] = []
    documented: dict[str, str] = {}
    section = ""
    current = ""
    indent = ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading.group(1).lower()
            current = ""
        elif line.startswith(":param"):
            section = "args"
            found = _PARAMETER.match(" " + line)
            if found:
                current = found["name"]
                documented[current] = found["text"].strip()
        elif line.startswith((":return", ":raise")):
            section = "other"
            current = ""
        elif not section:
            description.append(line.strip())
        elif section.startswith(("arg", "param")):
            found = _PARAMETER.match(line)
            if found and (not current or found["indent"] == indent):
                current = found["name"]
                indent = found["indent"]
                documented[current] = found["text"].strip()
            elif current and line.strip():
                documented[current] = f"{documented[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), documented
