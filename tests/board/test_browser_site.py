"""The documentation site in a real browser, on a desk and on a phone: nothing off-screen, nothing fetched from elsewhere.

`make board-images` builds the site first and keeps pictures in build/images.
"""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.board.test_browser import browser, pytestmark  # noqa: F401

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = (
    "index",
    "install",
    "recipes",
    "troubleshooting",
    "performance",
    "configuration/ppo_rollout",
    "zh/getting_started",
)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not SITE.exists():
        pytest.skip("the site is not built: make docs")
    handler = functools.partial(QuietHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("width", [1440, 390])
def test_the_site_fits_the_screen(browser: Any, address: str, width: int) -> None:  # noqa: F811
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((address, "data:")) or problems.append(asked.url))
    page.on("response", lambda reply: reply.status >= 400 and problems.append(f"{reply.status} {reply.url}"))
    for name in PAGES:
        place = "" if name == "index" else f"{name}/"
        page.goto(f"{address}/{place}")
        page.wait_for_selector("article h1")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            problems.append(f"{name} is wider than {width} pixels")
        if folder := os.environ.get("STROP_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{folder}/site-{name.replace('/', '-')}-{width}.png")
    context.close()
    assert problems == []
