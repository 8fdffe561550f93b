"""Real MCP servers on this machine, by standard input and by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from strop import http_replies
from strop.agents import mcp
from strop.agents.parsers.base import ToolCall
from strop.agents.tool_set import ToolSet
from tests.http_servers import PatientServer

pytest.importorskip("mcp")
SERVER = Path(__file__).parent / "mcp_server.py"


def box_of(folder: Path, entry: str, timeout: float = 60.0, **settings: Any) -> ToolSet:
    file = folder / "tools.yaml"
    file.write_text(f"tools:\n{entry}")
    return ToolSet.from_config(
        str(file), timeout=timeout, max_response_length=500, truncate_side="middle", max_parallel=8
    )


def told(box: ToolSet, *calls: ToolCall) -> tuple[list[Any], Any]:
    async def episode() -> tuple[list[Any], Any]:
        session = await box.open()
        results = await session.run(calls)
        await session.close()
        return results, session.counts

    return asyncio.run(episode())


STDIO = f"  - mcp: {{command: {sys.executable}, args: [{SERVER}], env: {{MCP_SECRET: '${{MY_TOKEN}}'}}}}\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connections wait until the server has started
        port = listening.getsockname()[1]
        descriptor = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(descriptor)], stderr=subprocess.DEVNULL, pass_fds=[descriptor]
        )
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def stdio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolSet]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MY_TOKEN", "opensesame")
    patch.setenv("STROP_TEST_SECRET", "hunter2")
    box = box_of(tmp_path_factory.mktemp("stdio"), STDIO, timeout=100.0)
    yield box
    box.close()
    patch.undo()


def test_tools_of_a_server_have_their_schemas(stdio):
    schemas = {schema["function"]["name"]: schema["function"] for schema in stdio.schemas}
    plain = {"add", "wait", "meet", "fail", "picture", "leave", "secret"}
    assert set(schemas) == plain | {"look", "put", "order", "leave_always"}
    assert schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert schemas["add"]["parameters"]["required"] == ["a"]


def test_calls_and_their_failures(stdio):
    calls = [
        ToolCall("add", {"a": 2, "b": 40}),
        ToolCall("add", {"a": "x"}),
        ToolCall("fail", {"word": "fly"}),
        ToolCall("picture"),
    ]
    [added, wrong, failed, picture], counts = told(stdio, *calls)
    assert added.text == "42" and not added.failed
    assert wrong.failed and "must be an integer" in wrong.text
    assert failed.failed and "cannot fly" in failed.text
    assert picture.failed and "it returned image" in picture.text
    assert (
        counts["tool_failures/wrong_arguments"]
        == counts["tool_failures/by_tool"]
        == counts["tool_failures/not_text"]
        == 1
    )


def test_a_server_sees_only_the_environment_it_is_given(stdio):
    [result], _ = told(stdio, ToolCall("secret"))
    assert result.text == "opensesame"


def test_calls_wait_together(stdio):
    results, _ = told(stdio, *[ToolCall("meet", {"count": 6})] * 6)
    assert [r.text for r in results] == ["met"] * 6


def test_a_server_that_dies_is_started_again(stdio):
    [gone], counts = told(stdio, ToolCall("leave"))
    assert gone.failed and counts["tool_failures"] == 1
    [again], _ = told(stdio, ToolCall("add", {"a": 1}))
    assert again.text == "2"


def test_calls_in_flight_are_repeated_where_that_does_no_harm(stdio, tmp_path, caplog):
    """Three kinds of calls are in flight when the server dies."""
    mark = str(tmp_path / "mark")
    words = {"look": "seen", "put": "done", "order": "pizza"}
    calls = [ToolCall(name, {"word": word, "mark": mark}) for name, word in words.items()]
    [seen, done, ordered], counts = told(stdio, *calls)
    assert seen.text.startswith("seen of") and done.text.startswith("done of")
    assert seen.text.split()[-1] == done.text.split()[-1]  # one new server, not two
    assert ordered.failed and counts["tool_failures"] == 1
    assert "died during this call and is started again" in ordered.text
    assert "may have had an effect, so it was not repeated" in ordered.text
    assert [r.message.partition(" (")[0] for r in caplog.records if "MCP" in r.message] == [
        f"The MCP server {sys.executable} died"
    ]
    [again], _ = told(stdio, calls[2])
    assert again.text == "pizza ordered"


def test_a_server_that_dies_of_every_call_is_given_up(stdio, monkeypatch):
    monkeypatch.setattr(mcp, "RESTART_PAUSES", (0.01,))
    [gone], _ = told(stdio, ToolCall("leave_always"))
    assert gone.failed and "died and cannot be reached again" in gone.text
    [again], _ = told(stdio, ToolCall("add", {"a": 1}))
    assert again.text == "2"


def test_over_http(url, tmp_path):
    box = box_of(tmp_path, f"  - mcp: {{url: '{url}'}}\n    tools: [add, wait]\n")
    assert list(box.tools) == ["add", "wait"]
    results, _ = told(box, ToolCall("add", {"a": 1}), ToolCall("add", {"a": 5, "b": 5}))
    assert [r.text for r in results] == ["2", "10"]
    results, _ = told(box, ToolCall("add", {"a": 7}))  # another event loop of the caller
    assert results[0].text == "8"
    box.close()


def test_a_call_that_takes_too_long(url, tmp_path):
    box = box_of(
        tmp_path,
        f"  - mcp: {{url: '{url}', headers: {{X-Test: yes}}}}\n    tools: [add, wait]\n",
    )
    limits = box.limits
    box.limits = replace(limits, timeout=0.5)
    [late], counts = told(box, ToolCall("wait", {"seconds": 300}))
    assert late.failed and counts["tool_failures/timed_out"] == 1
    box.limits = limits
    [fine], _ = told(box, ToolCall("add", {"a": 1}))
    assert fine.text == "2"
    box.close()


def test_verls_form(url, tmp_path):
    (tmp_path / "servers.json").write_text(
        json.dumps({"mcpServers": {"mine": {"url": url, "auth_token": "x"}}})
    )
    box = box_of(
        tmp_path,
        "  - class_name: verl.tools.mcp_base_tool.MCPBaseTool\n    config: {type: mcp, rate_limit: 10}\n"
        "    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [add]}\n",
    )
    assert list(box.tools) == ["add"]
    assert told(box, ToolCall("add", {"a": 1}))[0][0].text == "2"
    box.close()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("  - mcp: {command: no-such-program}\n", r"no-such-program could not be reached"),
        (
            "  - mcp: {url: 'http://127.0.0.1:9/mcp'}\n",
            r"MCP server http://127.0.0.1:9/mcp could not be reached",
        ),
        ("  - mcp: {args: [x]}\n", "needs either `url` or `command`"),
        ("  - mcp: {comand: x}\n", "unknown key 'comand'. Did you mean 'command'"),
        ("  - mcp: {mcp_servers_config_path: gone.json}\n", "gone.json must be a JSON file"),
    ],
)
def test_servers_that_cannot_be_reached_are_refused_at_once(tmp_path, entry, why):
    with pytest.raises(ValueError, match=why):
        box_of(tmp_path, entry)


def test_an_unknown_tool_of_a_server(url, tmp_path):
    with pytest.raises(ValueError, match=r"no MCP server has a tool 'ad'. Did you mean 'add'"):
        box_of(tmp_path, f"  - mcp: {{url: '{url}'}}\n    tools: [ad]\n")


def test_two_servers_with_a_tool_of_one_name(url, tmp_path):
    entry = f"  - mcp: {{url: '{url}'}}\n    tools: [add]\n"
    with pytest.raises(ValueError, match="Two tools are called 'add'"):
        box_of(tmp_path, entry + entry)


class EndlessReplies(BaseHTTPRequestHandler):
    """An MCP server whose results never end."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        results = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "serverInfo": {"name": "endless", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "read", "inputSchema": {"type": "object"}}]},
        }
        if request["method"] in results:
            reply = {"jsonrpc": "2.0", "id": request["id"], "result": results[request["method"]]}
            self.wfile.write(json.dumps(reply).encode())
            return
        with contextlib.suppress(OSError):
            while request["method"] == "tools/call":
                self.wfile.write(b" " * 65536)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_result_without_end_fails_its_call(tmp_path, monkeypatch):
    monkeypatch.setattr(http_replies, "MAX_REPLY_BYTES", 1 << 20)
    server = PatientServer(("127.0.0.1", 0), EndlessReplies)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        box = box_of(tmp_path, f"  - mcp: {{url: 'http://127.0.0.1:{server.server_port}/mcp'}}\n")
        [result], _ = told(box, ToolCall("read", {}))
        assert result.failed and "more than 1,048,576 bytes" in result.text
        box.close()
    finally:
        server.shutdown()
        server.server_close()
