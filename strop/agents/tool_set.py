"""The tools of a run, by name, from a YAML file:

tools:
  - class_name: my_tools.Retriever          # or path/to/file.py:Retriever; called with (config, tool_schema)
    config: {top_k: 3}
    tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}
  - function: path/to/file.py:weather       # any typed function; its docstring is the description
  - mcp: {command: python, args: [server.py]}     # every tool of an MCP server; or {url: http://...}
    tools: [add]                            # only these of them

Paths are relative to the YAML, then to the working directory.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from strop.agents.config_files import load_target, read_agent_file
from strop.agents.tool_schema import JsonObject
from strop.agents.tool_session import CallLimits, ToolSession
from strop.agents.tools import Tool, ToolSchema, tool_from_function
from strop.agents.verl_tool import OpenAIFunctionToolSchema, VerlTool
from strop.concurrency import BackgroundLoop
from strop.registry import did_you_mean

logger = logging.getLogger(__name__)
KINDS = ("class_name", "function", "mcp")
KEYS = (*KINDS, "config", "tool_schema", "tools")


class Closable(Protocol):
    """A connection to a server."""

    def close(self) -> None: ...


class ToolSet:
    """The tools of a run, the event loop that they run on, and their connections."""

    def __init__(
        self,
        tools: Iterable[Tool],
        limits: CallLimits,
        loop: BackgroundLoop | None = None,
        servers: Iterable[Closable] = (),
    ) -> None:
        """`servers` are closed with the tools."""
        self.tools: dict[str, Tool] = {}
        self.limits = limits
        self.loop = loop or BackgroundLoop("strop-tools")
        self.servers = list(servers)
        self._warned: set[str] = set()
        self._borrowed = False
        if self.servers:  # server processes must not outlive a run that forgets to close its tools
            weakref.finalize(self, _shut_down, self.servers, self.loop)
        for tool in tools:
            name = tool.schema.name
            if name in self.tools:
                raise ValueError(
                    f"Two tools are called {name!r}; a model could not tell them apart. Rename one of them."
                )
            self.tools[name] = tool

    @classmethod
    def from_config(
        cls,
        path: str | None,
        *,
        timeout: float,
        max_response_length: int,
        truncate_side: str,
        max_parallel: int,
        functions: Sequence[Callable[..., object]] = (),
    ) -> ToolSet:
        """Return the tools of a YAML file; none without a path. Any mistake in the file is a ValueError.

        `functions` are its tools themselves; the file is then not read.
        """
        limits = CallLimits(timeout, max_response_length, truncate_side, max_parallel)
        loop = BackgroundLoop("strop-tools")
        if functions:
            return cls([tool_from_function(function) for function in functions], limits, loop)
        if not path:
            return cls([], limits, loop)
        tools: list[Tool] = []
        servers: list[Closable] = []
        try:
            for number, entry in enumerate(read_entries(path), 1):
                where = f"Entry {number} of {path}"
                new_tools, new_servers = _tools_of(entry, where, Path(path).parent, loop, timeout)
                tools += new_tools
                servers += new_servers
            return cls(tools, limits, loop, servers)
        except BaseException:
            _shut_down(servers, loop)
            raise

    @functools.cached_property
    def schemas(self) -> list[JsonObject]:
        """The schemas in OpenAI's form, for a chat template."""
        return [tool.schema.as_openai() for tool in self.tools.values()]

    def select(self, names: Iterable[str]) -> ToolSet:
        """Return a set with only these of the tools."""
        chosen = []
        for name in names:
            if name not in self.tools:
                raise ValueError(
                    f"There is no tool {name!r}.{did_you_mean(name, self.tools)} Tools: "
                    f"{', '.join(self.tools)}."
                )
            chosen.append(self.tools[name])
        selection = ToolSet(chosen, self.limits, self.loop)
        selection._borrowed = True
        return selection

    async def open(self, tools_kwargs: Mapping[str, JsonObject | None] | None = None) -> ToolSession:
        """Return the tools for one episode; `tools_kwargs` is the row's {tool: {create_kwargs: {...}}}.

        A tool's `create` is called before its first call in the episode, so a tool that is not used costs
        nothing.
        """
        kwargs: dict[str, JsonObject] = {}
        for name, given in (tools_kwargs or {}).items():
            create = (given or {}).get("create_kwargs") or {}
            # Rows of one parquet file share a schema: a key that only other rows use is null here.
            present = {key: value for key, value in create.items() if value is not None}
            if name in self.tools:
                kwargs[name] = present
            elif present and name not in self._warned:
                self._warned.add(name)
                known = ", ".join(self.tools)
                logger.warning(
                    "Rows have tools_kwargs for %r, which is no configured tool (%s).", name, known
                )
        return ToolSession(self.tools, kwargs, self.limits, self.loop)

    def close(self) -> None:
        """Close connections to servers and the event loop of the tools. A selection leaves that to the set it
        was taken from."""
        if not self._borrowed:
            _shut_down(self.servers, self.loop)
            self.servers.clear()


def read_entries(path: str) -> list[JsonObject]:
    """Return the list under `tools:`, every entry of exactly one kind."""
    key = f"multi_turn.tool_config_path={path}"
    content = read_agent_file(path, "multi_turn.tool_config_path")
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{key} needs a list under `tools:` with at least one entry.")
    for number, entry in enumerate(entries, 1):
        _check_entry(entry, f"Entry {number} of {path}")
    return [dict(entry) for entry in entries]


def _check_entry(entry: object, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a mapping with one of {', '.join(KINDS)}, not {entry!r}.")
    unknown = [key for key in entry if key not in KEYS]
    if unknown:
        raise ValueError(
            f"{where} has an unknown key {unknown[0]!r}.{did_you_mean(str(unknown[0]), KEYS)} Known: "
            f"{', '.join(KEYS)}."
        )
    if not any(entry.get(kind) for kind in KINDS) or ("function" in entry and "class_name" in entry):
        raise ValueError(
            f"{where} must have exactly one of {', '.join(KINDS)}; it has "
            f"{', '.join(map(str, entry)) or 'nothing'}."
        )


def _tools_of(
    entry: JsonObject, where: str, folder: Path, loop: BackgroundLoop, timeout: float
) -> tuple[list[Tool], list[Closable]]:
    """Return the tools of one entry, and the connections that they use."""
    config = entry.get("config") or {}
    if entry.get("mcp") or config.get("type") == "mcp":
        from strop.agents.mcp import open_servers

        servers = open_servers(
            entry.get("mcp") or {}, entry.get("tools"), loop, folder, where, timeout=timeout
        )
        tools: list[Tool] = []
        for server in servers:
            tools += server.tools
        return tools, [*servers]
    schema = None
    if entry.get("tool_schema"):
        schema = ToolSchema.from_openai(entry["tool_schema"], where)
    if entry.get("function"):
        return [tool_from_function(load_target(entry["function"], folder, where), schema)], []
    target = load_target(entry["class_name"], folder, where)
    return [_tool_of_class(target, dict(config), entry, schema, where)], []


def _tool_of_class(
    target: Any, config: JsonObject, entry: JsonObject, schema: ToolSchema | None, where: str
) -> Tool:
    """Return a tool of the user's class: one with our protocol, or one written for verl."""
    name = entry["class_name"]
    if not inspect.isclass(target):
        raise ValueError(f"{where}: {name} is no class. A function goes under `function:`.")
    given = OpenAIFunctionToolSchema(entry["tool_schema"]) if entry.get("tool_schema") else None
    make: Callable[..., Any] = target
    try:
        tool = make(config, given)
    except Exception as error:  # user code may raise anything
        raise ValueError(
            f"{where}: {name}(config, tool_schema) failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(tool, "execute", None)):
        raise ValueError(f"{where}: {name} has no method `execute(instance_id, arguments)`.")
    if isinstance(getattr(tool, "schema", None), ToolSchema):
        our_tool: Tool = tool
        return our_tool
    if schema is None:
        schema = ToolSchema.from_openai(_verl_schema(tool), f"{where} ({name} brings none, so it)")
    return VerlTool(tool, schema)


def _verl_schema(tool: Any) -> object:
    """Return the schema that a tool of verl defines itself, or None."""
    if not hasattr(tool, "get_openai_tool_schema"):
        return None
    schema = tool.get_openai_tool_schema()
    if hasattr(schema, "model_dump"):
        return schema.model_dump(exclude_none=True)
    return schema


def _shut_down(servers: Iterable[Closable], loop: BackgroundLoop) -> None:
    for server in servers:
        server.close()
    loop.close()
