"""Tools of MCP servers, through the official client.

In the tools YAML: `mcp: {command, args, env, cwd}` or `mcp: {url, headers}`. verl's form is read too: `mcp:
{mcp_servers_config_path: servers.json, tool_selected_list: [...]}`, where the file has `mcpServers`. A connection lives on the
loop of the tools for the whole run, shared by all episodes; one that broke is opened again by the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.agents.tool_schema import ToolSchema
from strop.agents.tools import NotText, StatelessTool, ToolResult
from strop.extras import require
from strop.registry import did_you_mean
from strop.rewards.calls import BackgroundLoop

WHY = "An MCP server as a tool"
KEYS = ("command", "args", "env", "cwd", "url", "headers", "auth_token", "mcp_servers_config_path", "tool_selected_list")
ALIVE = 5.0  # seconds for a server to say that it is still there
CLOSING = 10.0  # seconds for a server to end


def open_servers(
    settings: Mapping[str, Any],
    names: Sequence[str] | None,
    loop: BackgroundLoop,
    folder: Path,
    where: str,
    *,
    timeout: float,
) -> list[Server]:
    """Connect to the servers of one entry of the YAML and ask for their tools; only `names` of them, if given."""
    servers: list[Server] = []
    try:
        for target in _targets(settings, folder, where):
            servers.append(Server(target, loop, where))
            servers[-1].open(timeout)
        wanted = names or settings.get("tool_selected_list")
        if wanted:
            _select(servers, wanted, where)
        return servers
    except BaseException:
        for server in servers:
            server.close()
        raise


class Server:
    """One connection. It is entered and left by one task, as the client demands, which waits in between."""

    def __init__(self, target: Mapping[str, Any], loop: BackgroundLoop, where: str):
        self.target, self.loop, self.where = target, loop, where
        self.name = str(target.get("url") or target.get("command"))
        self.tools: list[McpTool] = []
        self._keeper: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._over: asyncio.Event | None = None

    def open(self, timeout: float) -> None:
        """Connect and read the list of tools; ValueError if that fails or takes too long."""
        try:
            listed = self.loop.run(self._list(), timeout)
        except ValueError:  # the client is not installed
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {_innermost(error)}"
            raise ValueError(f"{self.where}: the MCP server {self.name} could not be reached. {reason}") from error
        self.tools = [McpTool(self, tool) for tool in listed]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.loop.run(self._disconnect(), CLOSING)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        client = await self._connected()
        try:
            return await client.call_tool(name, arguments)
        except Exception:
            if not await _answers(client):
                await self._disconnect()
            raise

    async def _list(self) -> list[Any]:
        client = await self._connected()
        found: list[Any] = []
        page = await client.list_tools()
        found += page.tools
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            found += page.tools
        return found

    async def _connected(self) -> Any:
        if self._client is None:
            self._client, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._keeper = asyncio.ensure_future(self._keep(self._client, self._over))
        return await asyncio.shield(self._client)

    async def _disconnect(self) -> None:
        keeper, over = self._keeper, self._over
        self._client = self._keeper = self._over = None
        if over is not None and keeper is not None:
            over.set()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(keeper), CLOSING)

    async def _keep(self, ready: asyncio.Future[Any], over: asyncio.Event) -> None:
        try:
            async with _client(self.target) as client:
                ready.set_result(client)
                await over.wait()
        except Exception as error:  # noqa: BLE001 - whatever keeps a server from answering is told to whoever waits for it
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # it may be that nobody waits any more
        finally:
            if self._client is ready:
                self._client = self._keeper = self._over = None


class McpTool(StatelessTool):
    def __init__(self, server: Server, listed: Any):
        self.server = server
        form = {"name": listed.name, "description": listed.description, "parameters": listed.input_schema}
        self.schema = ToolSchema.from_openai({"type": "function", "function": form}, f"The MCP server {server.name}")

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        result = await self.server.call(self.schema.name, arguments)
        return ToolResult(_text(result), failed=bool(result.is_error))


@contextlib.asynccontextmanager
async def _client(target: Mapping[str, Any]) -> AsyncIterator[Any]:
    mcp = require("mcp", extra="mcp", why=WHY)
    async with contextlib.AsyncExitStack() as stack:
        if target.get("command"):
            place = mcp.StdioServerParameters(**target)
        elif target.get("headers"):
            http = require("mcp.client.streamable_http", extra="mcp", why=WHY)
            sender = await stack.enter_async_context(http.create_mcp_http_client(headers=target["headers"]))
            place = http.streamable_http_client(target["url"], http_client=sender)
        else:
            place = target["url"]
        yield await stack.enter_async_context(mcp.Client(place))


async def _answers(client: Any) -> bool:
    try:
        await asyncio.wait_for(client.list_tools(cache_mode="bypass"), ALIVE)
    except Exception:  # noqa: BLE001 - any failure means that the connection is of no use
        return False
    return True


def _targets(settings: Mapping[str, Any], folder: Path, where: str) -> list[dict[str, Any]]:
    """What to connect to: the arguments of a command, or an address and headers."""
    strange = [str(key) for key in settings if key not in KEYS]
    if strange:
        raise ValueError(
            f"{where}: `mcp` has an unknown key {strange[0]!r}.{did_you_mean(strange[0], KEYS)} Known: {', '.join(KEYS)}."
        )
    listed = settings.get("mcp_servers_config_path")
    if listed:
        return [_target(server, folder, f"{where}, server {name!r}") for name, server in _listed(listed, folder, where).items()]
    return [_target(settings, folder, where)]


def _target(settings: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    url, command = settings.get("url"), settings.get("command")
    if bool(url) == bool(command):
        raise ValueError(
            f"{where}: `mcp` needs either `url` or `command` (with `args`), it has {', '.join(settings) or 'nothing'}."
        )
    if command:
        variables = {str(key): os.path.expandvars(str(value)) for key, value in (settings.get("env") or {}).items()}
        cwd = folder / str(settings.get("cwd") or ".")
        return {
            "command": str(command),
            "args": [str(word) for word in settings.get("args") or []],
            "env": variables or None,
            "cwd": cwd,
        }
    headers = {str(key): os.path.expandvars(str(value)) for key, value in (settings.get("headers") or {}).items()}
    if settings.get("auth_token"):
        headers.setdefault("Authorization", f"Bearer {os.path.expandvars(str(settings['auth_token']))}")
    return {"url": str(url), "headers": headers}


def _listed(path: str, folder: Path, where: str) -> dict[str, Any]:
    file = folder / path if (folder / path).is_file() else Path(path).expanduser()
    try:
        servers = json.loads(file.read_text())["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: mcp_servers_config_path={path} must be a JSON file with `mcpServers`: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f"{where}: mcp_servers_config_path={path} has no servers under `mcpServers`.")
    return servers


def _select(servers: Sequence[Server], names: Sequence[str], where: str) -> None:
    known = [tool.schema.name for server in servers for tool in server.tools]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{where}: no MCP server has a tool {name!r}.{did_you_mean(name, known)} Tools: {', '.join(known)}."
            )
    for server in servers:
        server.tools = [tool for tool in server.tools if tool.schema.name in names]


def _text(result: Any) -> str:
    """The text of a result; pictures and sounds are refused, because nothing shows them to the model."""
    other = sorted({block.type for block in result.content if not isinstance(getattr(block, "text", None), str)})
    if other:
        raise NotText(f"it returned {' and '.join(other)}, and only text can be told to the model")
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(block.text for block in result.content)


def _innermost(error: BaseException) -> BaseException:
    """The client runs in groups of tasks, whose errors come wrapped."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
