"""The tools of a run, by name, from a YAML:

tools:
  - class_name: my_tools.Retriever          # or path/to/file.py:Retriever; made as Retriever(config, tool_schema)
    config: {top_k: 3}
    tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}
  - function: path/to/file.py:weather       # any typed function; its docstring is the description
  - mcp: {command: python, args: [server.py]}                   # every tool of an MCP server; or {url: http://...}
    tools: [add]                            # only these of them

Paths are relative to the YAML, then to the working directory.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from strop.agents.session import CallLimits, Session
from strop.agents.tool_schema import ToolSchema
from strop.agents.tools import Tool, tool_from_function
from strop.agents.verl_tool import OpenAIFunctionToolSchema, VerlTool
from strop.registry import did_you_mean, load_attribute
from strop.rewards.calls import BackgroundLoop

logger = logging.getLogger(__name__)
KINDS = ("class_name", "function", "mcp")
KEYS = (*KINDS, "config", "tool_schema", "tools")
OURS = {"verl.tools.gsm8k_tool.Gsm8kTool": "strop.agents.gsm8k_tool.Gsm8kTool"}
"""Tools that verl ships and we have too, for files that name verl's."""


class Toolbox:
    def __init__(
        self, tools: Iterable[Tool], limits: CallLimits, loop: BackgroundLoop | None = None, servers: Iterable[Any] = ()
    ):
        """`servers` are closed with the toolbox."""
        self.tools: dict[str, Tool] = {}
        self.limits, self.loop, self.servers = limits, loop or BackgroundLoop("strop-tools"), list(servers)
        self._warned: set[str] = set()
        self._borrowed = False
        if self.servers:  # processes of ours must not outlive a run that forgets to close its toolbox
            weakref.finalize(self, _shut, self.servers, self.loop)
        for tool in tools:
            name = tool.schema.name
            if name in self.tools:
                raise ValueError(f"Two tools are called {name!r}; a model could not tell them apart. Rename one of them.")
            self.tools[name] = tool

    @classmethod
    def from_config(
        cls, path: str | None, *, timeout: float, max_response_length: int, truncate_side: str, max_parallel: int
    ) -> Toolbox:
        """The tools of a YAML file; none if there is no path. Whatever is wrong with it is a ValueError now."""
        limits = CallLimits(timeout, max_response_length, truncate_side, max_parallel)
        loop = BackgroundLoop("strop-tools")
        tools: list[Tool] = []
        servers: list[Any] = []
        try:
            for place, entry in enumerate(read_entries(path) if path else []):
                made, opened = _tools_of(entry, f"Entry {place + 1} of {path}", Path(str(path)).parent, loop, timeout)
                tools += made
                servers += opened
            return cls(tools, limits, loop, servers)
        except BaseException:
            _shut(servers, loop)
            raise

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """In OpenAI's form, for a chat template."""
        return [tool.schema.as_openai() for tool in self.tools.values()]

    def select(self, names: Iterable[str]) -> Toolbox:
        """The same tools, only these of them."""
        names = list(names)
        for name in names:
            if name not in self.tools:
                raise ValueError(f"There is no tool {name!r}.{did_you_mean(name, self.tools)} Tools: {', '.join(self.tools)}.")
        chosen = Toolbox([self.tools[name] for name in names], self.limits, self.loop)
        chosen._borrowed = True
        return chosen

    async def open(self, tools_kwargs: Mapping[str, Any] | None = None) -> Session:
        """The tools for one episode; `tools_kwargs` is the row's {tool: {create_kwargs: {...}}}.

        A tool's `create` is called before its first call in the episode, so a tool that is not used costs nothing.
        """
        kwargs: dict[str, dict[str, Any]] = {}
        for name, given in (tools_kwargs or {}).items():
            # Rows of one parquet file share a schema: what another row has is null here.
            create = (given or {}).get("create_kwargs") or {}
            present = {key: value for key, value in create.items() if value is not None}
            if name in self.tools:
                kwargs[name] = present
            elif present and name not in self._warned:
                self._warned.add(name)
                logger.warning("Rows have tools_kwargs for %r, which is no configured tool (%s).", name, ", ".join(self.tools))
        return Session(self.tools, kwargs, self.limits, self.loop)

    def close(self) -> None:
        """End connections to servers, and the loop of the tools. A selection of another toolbox leaves that to it."""
        if not self._borrowed:
            _shut(self.servers, self.loop)
            self.servers.clear()


def read_entries(path: str) -> list[dict[str, Any]]:
    """The list under `tools:`, every entry of exactly one kind."""
    import yaml

    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"multi_turn.tool_config_path={path} does not exist.")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"multi_turn.tool_config_path={path} is no valid YAML: {' '.join(str(error).split())}") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"multi_turn.tool_config_path={path} needs a list under `tools:` with at least one entry.")
    for place, entry in enumerate(entries):
        where = f"Entry {place + 1} of {path}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} must be a mapping with one of {', '.join(KINDS)}, not {entry!r}.")
        strange = [key for key in entry if key not in KEYS]
        if strange:
            raise ValueError(
                f"{where} has an unknown key {strange[0]!r}.{did_you_mean(str(strange[0]), KEYS)} Known: {', '.join(KEYS)}."
            )
        if not any(entry.get(kind) for kind in KINDS) or ("function" in entry and "class_name" in entry):
            raise ValueError(
                f"{where} must have exactly one of {', '.join(KINDS)}; it has {', '.join(map(str, entry)) or 'nothing'}."
            )
    return [dict(entry) for entry in entries]


def _tools_of(
    entry: Mapping[str, Any], where: str, folder: Path, loop: BackgroundLoop, timeout: float
) -> tuple[list[Tool], list[Any]]:
    config = entry.get("config") or {}
    if entry.get("mcp") or config.get("type") == "mcp":
        from strop.agents.mcp import open_servers

        servers = open_servers(entry.get("mcp") or {}, entry.get("tools"), loop, folder, where, timeout=timeout)
        return [tool for server in servers for tool in server.tools], servers
    schema = ToolSchema.from_openai(entry["tool_schema"], where) if entry.get("tool_schema") else None
    if entry.get("function"):
        return [tool_from_function(load_target(entry["function"], folder, where), schema)], []
    return [_tool_of_class(load_target(entry["class_name"], folder, where), dict(config), entry, schema, where)], []


def load_target(target: str, folder: Path, where: str) -> Any:
    """What `module.Name`, `module:Name` or `path/to/file.py:Name` stands for."""
    target = OURS.get(target, target)
    module, colon, name = str(target).rpartition(":")
    if not colon:
        module, _, name = str(target).rpartition(".")
    if not module or not name:
        raise ValueError(f"{where}: {target!r} must be module.Name or path/to/file.py:Name.")
    if module.endswith(".py") and (folder / module).is_file():
        module = str(folder / module)
    try:
        return load_attribute(module, name)
    except ValueError as error:
        advice = ""
        if "No module named 'verl" in str(error):
            advice = " BaseTool, ToolResponse and OpenAIFunctionToolSchema can be imported from strop.agents.verl_tool instead."
        raise ValueError(f"{where}: {error}{advice}") from error


def _tool_of_class(kind: Any, config: dict[str, Any], entry: Mapping[str, Any], schema: ToolSchema | None, where: str) -> Tool:
    if not inspect.isclass(kind):
        raise ValueError(f"{where}: {entry['class_name']} is no class. A function goes under `function:`.")
    given = OpenAIFunctionToolSchema(entry["tool_schema"]) if entry.get("tool_schema") else None
    make: Any = kind
    try:
        made = make(config, given)
    except Exception as error:  # the class is the user's
        raise ValueError(
            f"{where}: {entry['class_name']}(config, tool_schema) failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(made, "execute", None)):
        raise ValueError(f"{where}: {entry['class_name']} has no method `execute(instance_id, arguments)`.")
    if isinstance(getattr(made, "schema", None), ToolSchema):
        return made
    if schema is None:
        own: Any = made.get_openai_tool_schema() if hasattr(made, "get_openai_tool_schema") else None
        own = own.model_dump(exclude_none=True) if hasattr(own, "model_dump") else own
        schema = ToolSchema.from_openai(own, f"{where} ({entry['class_name']} brings none, so it)")
    return VerlTool(made, schema)


def _shut(servers: Iterable[Any], loop: BackgroundLoop) -> None:
    for server in servers:
        server.close()
    loop.close()
