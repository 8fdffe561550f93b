"""Tools of MCP servers, through the official client.

In the tools YAML: `mcp: {command, args, env, cwd}` or `mcp: {url, headers}`. verl's form is read too: `mcp:
{mcp_servers_config_path: servers.json, tool_selected_list: [...]}`, where the file has `mcpServers`. A
connection lives on the event loop of the tools for the whole run, and all episodes share it. When the server
dies, it is started (or connected to) again. Calls in flight of tools that declare readOnlyHint or
idempotentHint are repeated; others fail, because they may have had an effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from strop.agents.tool_schema import JsonObject
from strop.agents.tools import NotText, StatelessTool, ToolResult, ToolSchema
from strop.concurrency import BackgroundLoop
from strop.extras import require
from strop.http_replies import MAX_REPLY_BYTES, limit_replies
from strop.registry import did_you_mean

log = logging.getLogger(__name__)

WHY = "An MCP server as a tool"
KEYS = (
    "command",
    "args",
    "env",
    "cwd",
    "url",
    "headers",
    "auth_token",
    "mcp_servers_config_path",
    "tool_selected_list",
)
PING_SECONDS = 5.0
"""Seconds for a server to show that it still answers."""
CLOSING_SECONDS = 10.0
"""Seconds for a server to end."""
RESTART_PAUSES = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each attempt to reach a server again."""


class ServerLost(ConnectionError):
    """The server died during a call, or cannot be reached any more."""


class ToolHints(Protocol):
    """What a server says about a tool."""

    read_only_hint: bool | None
    idempotent_hint: bool | None


class ListedTool(Protocol):
    """A tool as the MCP client lists it."""

    name: str
    description: str | None
    input_schema: JsonObject
    annotations: ToolHints | None


class ContentBlock(Protocol):
    """A part of a result; blocks of type text have a `text`."""

    type: str


class CallResult(Protocol):
    """What the MCP client returns for a call."""

    content: Sequence[ContentBlock]
    structured_content: object
    is_error: bool | None


class McpClient(Protocol):
    """The methods of the MCP client that are used here."""

    async def call_tool(self, name: str, arguments: JsonObject) -> CallResult: ...

    async def list_tools(self, **options: object) -> Any: ...


def open_servers(
    settings: JsonObject,
    names: Sequence[str] | None,
    loop: BackgroundLoop,
    folder: Path,
    where: str,
    *,
    timeout: float,
) -> list[McpServer]:
    """Connect to the servers of one entry of the YAML and list their tools, or only `names` of them."""
    servers: list[McpServer] = []
    try:
        for target in _targets(settings, folder, where):
            servers.append(McpServer(target, loop, where))
            servers[-1].open(timeout)
        wanted = names or settings.get("tool_selected_list")
        if wanted:
            _select(servers, wanted, where)
        return servers
    except BaseException:
        for server in servers:
            server.close()
        raise


class McpServer:
    """One connection. The client demands that the same task opens and closes it; that task waits in
    between."""

    def __init__(self, target: JsonObject, loop: BackgroundLoop, where: str) -> None:
        self.target = target
        self.loop = loop
        self.where = where
        self.name = str(target.get("url") or target.get("command"))
        self.tools: list[McpTool] = []
        self._connection: asyncio.Task[None] | None = None
        self._client: asyncio.Future[McpClient] | None = None
        self._closing: asyncio.Event | None = None

    def open(self, timeout: float) -> None:
        """Connect and list the tools; ValueError if that fails or takes too long."""
        try:
            listed = self.loop.run(self._list_tools(), timeout)
        except ValueError:  # the client is not installed
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {_innermost(error)}"
            raise ValueError(
                f"{self.where}: the MCP server {self.name} could not be reached. {reason}"
            ) from error
        self.tools = [McpTool(self, tool) for tool in listed]

    def close(self) -> None:
        """Close the connection, or give up after a while."""
        with contextlib.suppress(TimeoutError):
            self.loop.run(self._disconnect(), CLOSING_SECONDS)

    async def call(self, name: str, arguments: JsonObject, *, repeatable: bool = False) -> CallResult:
        """Call a tool. A server that died is started again, and the call is repeated if that is safe.

        The timeout of the tool limits all attempts together.
        """
        problem: Exception | None = None
        for pause in (0.0, *RESTART_PAUSES):
            if problem is not None:
                await asyncio.sleep(pause)
            try:
                client, connection = await self._connect()
            except Exception as error:  # noqa: BLE001 - whatever the client raises: nothing was sent yet
                problem = error
                continue
            try:
                return await client.call_tool(name, arguments)
            except Exception as error:
                if await _answers(client):
                    raise  # an error of the call, not of the connection
                problem = error
                await self._drop(connection, error)
                if not repeatable:
                    raise ServerLost(
                        f"the MCP server {self.name} died during this call and is started again. The call "
                        "may have had an effect, so it was not repeated"
                    ) from error
        assert problem is not None
        raise ServerLost(
            f"the MCP server {self.name} died and cannot be reached again ({_innermost(problem)})"
        ) from problem

    async def _drop(self, connection: asyncio.Task[None] | None, error: Exception) -> None:
        """Close a connection of a dead server; of many calls in flight only the first one does it."""
        if connection is None or self._connection is not connection:
            return
        log.warning("The MCP server %s died (%s). It is started again.", self.name, _innermost(error))
        await self._disconnect()

    async def _list_tools(self) -> list[ListedTool]:
        client, _ = await self._connect()
        tools: list[ListedTool] = []
        page = await client.list_tools()
        tools += page.tools
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    async def _connect(self) -> tuple[McpClient, asyncio.Task[None] | None]:
        """The client, and the task that holds its connection."""
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._connection = asyncio.ensure_future(self._hold_connection(self._client, self._closing))
        connection = self._connection  # another call may replace it during the wait
        return await asyncio.shield(self._client), connection

    async def _disconnect(self) -> None:
        connection = self._connection
        closing = self._closing
        self._forget_connection()
        if closing is not None and connection is not None:
            closing.set()
            await asyncio.wait([connection], timeout=CLOSING_SECONDS)  # raises none of its errors

    async def _hold_connection(self, ready: asyncio.Future[McpClient], closing: asyncio.Event) -> None:
        """Open the connection, and close it when `closing` is set."""
        try:
            async with _open_client(self.target) as client:
                ready.set_result(client)
                await closing.wait()
        except Exception as error:  # noqa: BLE001 - raised where the client is awaited
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # marks it as seen, in case nothing awaits it any more
        finally:
            if self._client is ready:
                self._forget_connection()

    def _forget_connection(self) -> None:
        self._client = None
        self._connection = None
        self._closing = None


class McpTool(StatelessTool):
    """One tool of an MCP server."""

    def __init__(self, server: McpServer, listed: ListedTool) -> None:
        self.server = server
        hints = listed.annotations
        self.repeatable = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        function = {
            "name": listed.name,
            "description": listed.description,
            "parameters": listed.input_schema,
        }
        self.schema = ToolSchema.from_openai(
            {"type": "function", "function": function}, f"The MCP server {server.name}"
        )

    async def execute(self, instance_id: str, arguments: JsonObject) -> ToolResult:
        result = await self.server.call(self.schema.name, arguments, repeatable=self.repeatable)
        return ToolResult(_text(result), failed=bool(result.is_error))


@contextlib.asynccontextmanager
async def _open_client(target: JsonObject) -> AsyncIterator[McpClient]:
    mcp = require("mcp", extra="mcp", why=WHY)
    async with contextlib.AsyncExitStack() as stack:
        if target.get("command"):
            place = mcp.StdioServerParameters(**target)
        else:
            http = require("mcp.client.streamable_http", extra="mcp", why=WHY)
            sender = http.create_mcp_http_client(headers=target["headers"] or None)
            # The error of its HTTP library, because the client hands that one to the call.
            limit_replies(http.httpx2, sender, http.httpx2.StreamError)
            await stack.enter_async_context(sender)
            place = http.streamable_http_client(
                target["url"], http_client=sender, max_sse_event_size=MAX_REPLY_BYTES
            )
        yield await stack.enter_async_context(mcp.Client(place))


async def _answers(client: McpClient) -> bool:
    try:
        await asyncio.wait_for(client.list_tools(cache_mode="bypass"), PING_SECONDS)
    except Exception:  # noqa: BLE001 - any failure means that the connection is of no use
        return False
    return True


# --- settings -----------------------------------------------------------------------------------------------


def _targets(settings: JsonObject, folder: Path, where: str) -> list[JsonObject]:
    """Return what to connect to: the arguments of a command, or an address and headers."""
    unknown = [str(key) for key in settings if key not in KEYS]
    if unknown:
        raise ValueError(
            f"{where}: `mcp` has an unknown key {unknown[0]!r}.{did_you_mean(unknown[0], KEYS)} Known: "
            f"{', '.join(KEYS)}."
        )
    path = settings.get("mcp_servers_config_path")
    if not path:
        return [_target(settings, folder, where)]
    targets = []
    for name, server in _read_servers(path, folder, where).items():
        targets.append(_target(server, folder, f"{where}, server {name!r}"))
    return targets


def _target(settings: JsonObject, folder: Path, where: str) -> JsonObject:
    url = settings.get("url")
    command = settings.get("command")
    if bool(url) == bool(command):
        raise ValueError(
            f"{where}: `mcp` needs either `url` or `command` (with `args`), it has "
            f"{', '.join(settings) or 'nothing'}."
        )
    if command:
        return {
            "command": str(command),
            "args": [str(word) for word in settings.get("args") or []],
            "env": _expanded(settings.get("env")) or None,
            "cwd": folder / str(settings.get("cwd") or "."),
        }
    headers = _expanded(settings.get("headers"))
    if settings.get("auth_token"):
        headers.setdefault("Authorization", f"Bearer {os.path.expandvars(str(settings['auth_token']))}")
    return {"url": str(url), "headers": headers}


def _expanded(values: Mapping[str, object] | None) -> dict[str, str]:
    """Return the values as text, with environment variables expanded."""
    return {str(key): os.path.expandvars(str(value)) for key, value in (values or {}).items()}


def _read_servers(path: str, folder: Path, where: str) -> dict[str, JsonObject]:
    """Return the `mcpServers` of a JSON file."""
    file = folder / path
    if not file.is_file():
        file = Path(path).expanduser()
    try:
        servers = json.loads(file.read_text())["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: mcp_servers_config_path={path} must be a JSON file with `mcpServers`: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f"{where}: mcp_servers_config_path={path} has no servers under `mcpServers`.")
    return servers


def _select(servers: Sequence[McpServer], names: Sequence[str], where: str) -> None:
    """Keep only the tools with these names."""
    known = []
    for server in servers:
        known += [tool.schema.name for tool in server.tools]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{where}: no MCP server has a tool {name!r}.{did_you_mean(name, known)} Tools: "
                f"{', '.join(known)}."
            )
    for server in servers:
        server.tools = [tool for tool in server.tools if tool.schema.name in names]


def _text(result: CallResult) -> str:
    """Return the text of a result; images and audio are refused, because the model gets text only."""
    texts = []
    other = set()
    for block in result.content:
        text = getattr(block, "text", None)
        if isinstance(text, str):
            texts.append(text)
        else:
            other.add(block.type)
    if other:
        raise NotText(f"it returned {' and '.join(sorted(other))}, and only text can be shown to the model")
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _innermost(error: BaseException) -> BaseException:
    """The client runs in task groups, whose errors come wrapped."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
