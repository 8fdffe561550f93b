"""A small MCP server, started by the tests: `python mcp_server.py` (stdio) or `python mcp_server.py PORT` (streamable HTTP)."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

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


@server.tool()
def secret() -> str:
    """What the environment says."""
    return os.environ.get("MCP_SECRET", "") + os.environ.get("STROP_TEST_SECRET", "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
