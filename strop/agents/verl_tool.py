"""Tools written for verl: classes made as `Class(config, tool_schema)`, recognised by their methods.

    async create(instance_id=None, **kwargs) -> id or (id, response)
    async execute(instance_id, parameters, **kwargs) -> (response, reward, metrics)
    async calc_reward(instance_id, **kwargs) -> float
    async release(instance_id, **kwargs)

A response is text, or an object with `text`. A file that imports verl needs verl installed; `BaseTool`, `ToolResponse` and
`OpenAIFunctionToolSchema` can be imported from here instead.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from strop.agents.tool_schema import ToolSchema
from strop.agents.tools import NotText, ToolResult, result_of


class OpenAIFunctionToolSchema(dict[str, Any]):
    """A schema whose parts can be read as keys and as attributes, at every depth."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError as error:
            raise AttributeError(name) from error
        return OpenAIFunctionToolSchema(value) if isinstance(value, Mapping) else value

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
        return cls(value)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(self)


@dataclass
class ToolResponse:
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """The base class of verl's tools."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict[str, Any]]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Nothing is held."""


@dataclass
class Episode:
    """What a verl tool is told about its episode, as `agent_data`."""

    request_id: str
    tools_kwargs: dict[str, Any]
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlTool:
    """A tool of verl's under our protocol."""

    def __init__(self, tool: Any, schema: ToolSchema):
        self.tool, self.schema = tool, schema
        self._episodes: dict[str, Episode] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        made = await called(self.tool.create, instance_id, **kwargs, create_kwargs=kwargs)
        found = made[0] if isinstance(made, tuple) else made
        identity = found if isinstance(found, str) and found else instance_id
        self._episodes[identity] = Episode(identity, {self.schema.name: {"create_kwargs": kwargs}})
        return identity

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        outcome = await called(self.tool.execute, instance_id, arguments, agent_data=self._episodes.get(instance_id))
        response, reward, metrics = outcome if isinstance(outcome, tuple) and len(outcome) == 3 else (outcome, 0.0, {})
        numbers = {str(name): float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        return ToolResult(text_of(response), 0.0 if reward is None else float(reward), numbers)

    async def calc_reward(self, instance_id: str) -> float:
        return float(await called(getattr(self.tool, "calc_reward", _nothing), instance_id) or 0.0)

    async def release(self, instance_id: str) -> None:
        self._episodes.pop(instance_id, None)
        await called(getattr(self.tool, "release", _nothing), instance_id)


async def called(method: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call with those named arguments that the method takes, and wait for the result where it is a coroutine."""
    parameters = inspect.signature(method).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        named = {name: value for name, value in named.items() if name in names}
    result = method(*values, **named)
    return await result if inspect.isawaitable(result) else result


def _nothing(instance_id: str) -> None:
    return None


def text_of(response: Any) -> str:
    """The text of a response; pictures are refused, because nothing shows them to the model."""
    if isinstance(response, Mapping) and set(response) <= {"text", "image", "video"}:
        response = SimpleNamespace(**{"text": None, "image": None, "video": None, **response})
    if not hasattr(response, "text"):
        return result_of(response).text
    shown = [kind for kind in ("image", "video") if getattr(response, kind, None)]
    if shown:
        raise NotText(f"it returned {' and '.join(shown)}, and only text can be told to the model")
    text = response.text
    if text is not None and not isinstance(text, str):
        raise NotText(f"it returned {type(text).__name__} as text")
    return text or ""
