"""The documentation site in a real browser, on a desk and on a phone: nothing off-screen, nothing fetched from elsewhere, and
the search finds pages.

`make test-browser` builds the site first; `make board-images` also keeps pictures in build/images.
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
TABLES_THAT_SCROLL = (
    "[...document.querySelectorAll('.md-typeset__scrollwrap')].some(it => it.scrollWidth > it.clientWidth)"
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
        if name != "performance" and page.evaluate(TABLES_THAT_SCROLL):
            problems.append(f"{name} has a table that is wider than {width} pixels")
        if folder := os.environ.get("STROP_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{folder}/site-{name.replace('/', '-')}-{width}.png")
    context.close()
    assert problems == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("docker", "install/"),
        ("FAQ", "faq/"),
        ("DAPO", "recipes/"),
        ("out of memory", "tuning/"),
        ("filter_groups", "configuration/"),
    ],
)
def test_the_search_finds(words: str, page: str, browser: Any, address: str) -> None:  # noqa: F811
    """`page` is among the first three pages that the search names."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    site = context.new_page()
    site.goto(f"{address}/")
    site.wait_for_selector("article h1")
    site.focus("input[data-md-component=search-query]")
    ready = "document.querySelector('.md-search-result__meta').textContent.includes('Type to start')"
    site.wait_for_function(ready)
    site.keyboard.type(words)  # the page listens to keys
    site.wait_for_selector(".md-search-result__item a")
    links = site.eval_on_selector_all(
        ".md-search-result__item > a", "found => found.map(link => new URL(link.href).pathname)"
    )
    context.close()
    assert any(link.lstrip("/").startswith(page) for link in links[:3]), links[:6]
