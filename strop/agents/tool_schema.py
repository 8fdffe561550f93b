"""What the model reads about a tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolSchema:
    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object: {"type": "object", "properties": {...}, "required": [...]}."""

    def as_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @classmethod
    def from_openai(cls, schema: Any, where: str) -> ToolSchema:
        """From {"type": "function", "function": {name, description, parameters}}; `where` is said in errors."""
        function = schema.get("function") if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(
                f"{where} needs a schema of the form {{type: function, function: {{name, description, parameters}}}}, "
                f"not {schema!r}."
            )
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        if parameters.get("type", "object") != "object" or not isinstance(parameters.get("properties") or {}, Mapping):
            raise ValueError(
                f"The parameters of tool {function['name']!r} of {where} must be the schema of an object, "
                f"{{type: object, properties: {{...}}, required: [...]}}, not {parameters!r}."
            )
        parameters = {"type": "object", **parameters, "properties": dict(parameters.get("properties") or {})}
        return cls(function["name"], str(function.get("description") or ""), parameters)
