"""`strop board DIR`: the web page over the runs under a folder, until Ctrl-C."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from strop.board.app import LOCAL, Board, build_app
from strop.extras import require

PORT = 8700
MIN_TOKEN_LENGTH = 16
TOKEN_VARIABLE = "STROP_BOARD_TOKEN"


def main(arguments: Sequence[str]) -> int:
    """Entry point of `strop board`."""
    options = _parse(arguments)
    root = Path(options.dir)
    if not root.is_dir():
        raise ValueError(
            f"There is no folder {root}. Name one with runs in it, such as trainer.default_local_dir."
        )
    token = checked_token(options.token or os.environ.get(TOKEN_VARIABLE), options.host)
    uvicorn = require("uvicorn", extra="board", why="strop board")
    host = options.host
    if ":" in host:  # IPv6
        host = f"[{host}]"
    board = Board(root, read_only=options.read_only)
    app = build_app(board, token=token, hosts=(*LOCAL, host))
    server_socket = _listen(options.host, options.port)
    port = server_socket.getsockname()[1]
    url = f"http://{host}:{port}/"
    if token:
        url += f"?token={token}"
    sys.stdout.write(f"The board of {root.resolve()}: {url}\n")
    if not token:
        sys.stdout.write(f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}\n")
    sys.stdout.flush()
    # Requests must not wait long for the thread that reads metrics.
    sys.setswitchinterval(0.0005)
    # Read the metrics while the user opens a browser.
    threading.Thread(target=board.list_runs, name="first look", daemon=True).start()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False))
    server.run(sockets=[server_socket])
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="strop board", description="A web page over the runs under a folder."
    )
    parser.add_argument(
        "dir", nargs="?", default=".", help="folder of one run or of many (default: this one)"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any free one (default: {PORT})")
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen; any other than this machine needs a token"
    )
    parser.add_argument(
        "--token", help=f"password of the board; better set in {TOKEN_VARIABLE}, which `ps` does not show"
    )
    parser.add_argument("--read-only", action="store_true", help="write no notes on runs")
    return parser.parse_args(list(arguments))


def checked_token(token: str | None, host: str) -> str | None:
    """The token that requests must have, or None. A host that other machines reach needs one."""
    if not token:
        if is_this_machine(host):
            return None
        raise ValueError(
            f"--host {host} lets other machines in, so the board needs a token: --token $(openssl rand -hex "
            "16). Or keep 127.0.0.1 and come through a tunnel: ssh -L 8700:127.0.0.1:8700 MACHINE."
        )
    is_plain = token.isascii() and token.replace("-", "").replace("_", "").isalnum()
    if len(token) < MIN_TOKEN_LENGTH or not is_plain:
        raise ValueError(
            f"The token has {len(token)} characters; it needs {MIN_TOKEN_LENGTH} or more letters, digits, - "
            "or _, such as those of: openssl rand -hex 16."
        )
    return token


def is_this_machine(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host {host} --port {port} cannot be used: {getattr(error, 'strerror', None) or error}."
        ) from error
