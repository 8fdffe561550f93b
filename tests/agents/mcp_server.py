"""A small MCP server, started by the tests: `python mcp_server.py` (stdio) or `python mcp_server.py DESCRIPTOR`
(streamable HTTP, on a listening socket that it inherits)."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("for tests")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


waiting: list[asyncio.Event] = []


@server.tool()
async def meet(count: int) -> str:
    """Wait until so many calls wait."""
    waiting.append(asyncio.Event())
    if len(waiting) == count:
        for event in waiting:
            event.set()
    await waiting[-1].wait()
    return "met"


@server.tool()
def fail(word: str) -> str:
    """Fail."""
    raise ToolError(f"cannot {word}")


@server.tool()
def picture() -> Any:
    """A picture."""
    return Image(data=b"png", format="png")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(1)


dying = threading.Event()


async def _die_once(mark: str) -> None:
    """The first call of all ends this server a moment later, when other calls have arrived too."""
    if not os.path.exists(mark):
        os.close(os.open(mark, os.O_CREAT))
        dying.set()
        threading.Timer(0.5, os._exit, [1]).start()
    if dying.is_set():
        await asyncio.sleep(60)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def look(word: str, mark: str) -> str:
    """Read something."""
    await _die_once(mark)
    return f"{word} of {os.getpid()}"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def put(word: str, mark: str) -> str:
    """Write something that may be written twice."""
    await _die_once(mark)
    return f"{word} of {os.getpid()}"


@server.tool()
async def order(word: str, mark: str) -> str:
    """Order something."""
    await _die_once(mark)
    return f"{word} ordered"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def leave_always() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def secret() -> str:
    """What the environment says."""
    return os.environ.get("MCP_SECRET", "") + os.environ.get("STROP_TEST_SECRET", "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import uvicorn

        config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
        uvicorn.Server(config).run([socket.socket(fileno=int(sys.argv[1]))])
    else:
        server.run()
