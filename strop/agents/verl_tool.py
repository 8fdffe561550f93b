"""Tools written for verl: classes called as `Class(config, tool_schema)`, recognised by their methods.

    async create(instance_id=None, **kwargs) -> id or (id, response)
    async execute(instance_id, parameters, **kwargs) -> (response, reward, metrics)
    async calc_reward(instance_id, **kwargs) -> float
    async release(instance_id, **kwargs)

A response is text, or an object with `text`. A file that imports verl needs verl installed; `BaseTool`,
`ToolResponse` and `OpenAIFunctionToolSchema` can be imported from here instead.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from strop.agents.tool_schema import JsonObject
from strop.agents.tools import NotText, ToolResult, ToolSchema, result_of

# --- verl's classes, for files written for verl -------------------------------------------------------------


class OpenAIFunctionToolSchema(JsonObject):
    """A schema whose parts can be read as keys and as attributes, at every depth."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError as error:
            raise AttributeError(name) from error
        if isinstance(value, Mapping):
            return OpenAIFunctionToolSchema(value)
        return value

    @classmethod
    def model_validate(cls, value: JsonObject) -> OpenAIFunctionToolSchema:
        return cls(value)

    def model_dump(self, **_: object) -> JsonObject:
        return dict(self)


@dataclass
class ToolResponse:
    """verl's response of a tool."""

    text: str | None = None
    image: list[object] | None = None
    video: list[object] | None = None


class BaseTool:
    """The base class of verl's tools."""

    def __init__(self, config: JsonObject, tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float, JsonObject]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """Nothing is held."""


@dataclass
class VerlEpisode:
    """What a verl tool gets about its episode, as `agent_data`."""

    request_id: str
    tools_kwargs: JsonObject
    extra_fields: JsonObject = field(default_factory=dict)


# --- a tool of verl under our protocol ----------------------------------------------------------------------


class VerlTool:
    """Adapts a tool of verl to the protocol `Tool`."""

    def __init__(self, tool: Any, schema: ToolSchema) -> None:
        self.tool = tool
        self.schema = schema
        self._episodes: dict[str, VerlEpisode] = {}

    async def create(self, instance_id: str, **kwargs: object) -> str:
        created = await call_verl(self.tool.create, instance_id, **kwargs, create_kwargs=kwargs)
        found = created[0] if isinstance(created, tuple) else created
        identity = found if isinstance(found, str) and found else instance_id
        self._episodes[identity] = VerlEpisode(identity, {self.schema.name: {"create_kwargs": kwargs}})
        return identity

    async def execute(self, instance_id: str, arguments: JsonObject) -> ToolResult:
        agent_data = self._episodes.get(instance_id)
        outcome = await call_verl(self.tool.execute, instance_id, arguments, agent_data=agent_data)
        if not isinstance(outcome, tuple) or len(outcome) != 3:
            return ToolResult(text_of(outcome), images=images_of(outcome))
        response, reward, metrics = outcome
        numbers = {}
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                numbers[str(name)] = float(value)
        earned = 0.0 if reward is None else float(reward)
        return ToolResult(text_of(response), earned, numbers, images=images_of(response))

    async def calc_reward(self, instance_id: str) -> float:
        if not hasattr(self.tool, "calc_reward"):
            return 0.0
        return float(await call_verl(self.tool.calc_reward, instance_id) or 0.0)

    async def release(self, instance_id: str) -> None:
        self._episodes.pop(instance_id, None)
        if hasattr(self.tool, "release"):
            await call_verl(self.tool.release, instance_id)


async def call_verl(method: Callable[..., Any], *values: object, **named: object) -> Any:
    """Call with those named arguments that the method takes, and await the result if it is a coroutine."""
    parameters = inspect.signature(method).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        named = {name: value for name, value in named.items() if name in names}
    result = method(*values, **named)
    if inspect.isawaitable(result):
        return await result
    return result


def text_of(response: Any) -> str:
    """Return the text of a response; videos are refused."""
    response = _response(response)
    if not hasattr(response, "text"):
        return result_of(response).text
    if getattr(response, "video", None):
        raise NotText("it returned a video, and only text and images can be shown to the model")
    text = response.text
    if text is not None and not isinstance(text, str):
        raise NotText(f"it returned {type(text).__name__} as text")
    return text or ""


def images_of(response: Any) -> tuple[object, ...]:
    """Return the images of a response: a list, or one."""
    images = getattr(_response(response), "image", None)
    if images is None:
        return ()
    if isinstance(images, list | tuple):
        return tuple(images)
    return (images,)


def _response(response: Any) -> Any:
    if isinstance(response, Mapping) and set(response) <= {"text", "image", "video"}:
        return SimpleNamespace(**{"text": None, "image": None, "video": None, **response})
    return response
