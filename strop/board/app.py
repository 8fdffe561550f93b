"""The web application: a few routes that read. Answers are made in threads, so a slow disk holds up nobody else."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from strop.board import describe
from strop.board.crew import LONGEST_TURN, QUICK, SEARCHING, Crew
from strop.board.curves import MetricFile, curves
from strop.board.find import METRICS, NotFound, Runs
from strop.board.listing import Listings
from strop.board.metric_store import MetricStore
from strop.board.misses import Misses
from strop.board.sample_file import SHOWN, SORTED, Damaged
from strop.board.samples import Query, SampleFolder
from strop.extras import require
from strop.run.plain_json import to_json

STATIC = Path(__file__).parent / "static"
COOKIE = "strop_board"
LOCAL = ("127.0.0.1", "localhost", "[::1]")
MOST_POINTS, MOST_CURVES = 2000, 400
LARGEST_PAGE = 100
LONGEST_SEARCH = 200
FRESH = 1.0
"""Seconds for which a list of runs is taken as it is."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Wrong(ValueError):
    """A request that makes no sense."""


class Board:
    """Answers to questions about the runs under a folder, as plain values."""

    def __init__(self, root: Path):
        self.runs = Runs(root)
        self.store = MetricStore()
        self.listings = Listings()
        self.misses = Misses()
        self._listing = threading.Lock()
        self._listed: tuple[float, Any] = (0.0, None)

    def list_runs(self, ask: Ask | None = None) -> Any:
        """Every reader asks for this every few seconds: one answer serves all who ask at about the same time."""
        with self._listing:
            until, listed = self._listed
            if listed is None or time.monotonic() >= until:
                found = [describe.summary(run, self.store, self.listings) for run in self.runs.all().values()]
                listed = {"root": self.runs.root.name, "runs": found}
                self._listed = (time.monotonic() + FRESH, listed)
        return listed

    def names(self, ask: Ask) -> Any:
        """Metrics of a run."""
        path = self.runs.get(ask.path("run")).file(METRICS)
        return {"metrics": self.store.ask(path, lambda file: sorted(file.columns))}

    def curves(self, ask: Ask) -> Any:
        runs, names = ask.many("run"), ask.many("metric")
        points = ask.number("points", 400, most=MOST_POINTS)
        if len(runs) * len(names) > MOST_CURVES:
            raise Wrong(f"{len(runs)} runs x {len(names)} metrics are more than {MOST_CURVES} curves.")
        stacked = ask.text("stacked", 1) == "1"
        files = {run: self.runs.get(run).file(METRICS) for run in runs}

        def drawn(file: MetricFile) -> Any:
            return curves(file, names, points, stacked=stacked)

        return {run: self.store.ask(path, drawn) for run, path in files.items()}

    def config(self, ask: Ask) -> Any:
        return describe.config(self.runs.get(ask.path("run")))

    def alerts(self, ask: Ask) -> Any:
        return describe.alerts(self.runs.get(ask.path("run")))

    def checkpoints(self, ask: Ask) -> Any:
        return describe.checkpoints(self.runs.get(ask.path("run")))

    def steps(self, ask: Ask) -> Any:
        """Steps of which samples are there."""
        return self._samples(ask).steps()

    def groups(self, ask: Ask) -> Any:
        query = Query(
            show=ask.choice("show", SHOWN, "all"),
            sort=ask.choice("sort", SORTED, "order"),
            search=ask.text("search", LONGEST_SEARCH),
            offset=ask.number("offset", 0),
            limit=ask.number("limit", 30, most=LARGEST_PAGE),
        )
        samples, split = self._samples(ask), ask.path("split")
        if ask.text("step", 20):
            try:
                return samples.page(split, ask.number("step", 0), query)
            except Damaged as damaged:
                return {"damaged": [str(damaged)]}
        start = (ask.number("from", 0), query.offset) if ask.text("from", 20) else None
        return samples.scan(split, query, start, ask.seconds)

    def group(self, ask: Ask) -> Any:
        return self._samples(ask).group(ask.path("split"), ask.path("step"), ask.path("group"))

    def tokens(self, ask: Ask) -> Any:
        place = (ask.path("split"), ask.path("step"), ask.path("group"), ask.path("sample"))
        return self._samples(ask).tokens(*place, ask.number("start", 0))

    def text(self, ask: Ask) -> Any:
        place = (ask.path("split"), ask.path("step"), ask.path("group"), ask.path("sample"))
        return self._samples(ask).text(*place, ask.path("column"), ask.number("start", 0))

    def history(self, ask: Ask) -> Any:
        return self._samples(ask).history(ask.path("split"), ask.path("index"), ask.text("source", 1000), ask.seconds)

    def _samples(self, ask: Ask) -> SampleFolder:
        return SampleFolder(self.runs.get(ask.path("run")), self.listings, self.misses)

    def searches(self, question: Callable[[Ask], Any], ask: Ask) -> bool:
        """Whether an answer takes many files."""
        return question == self.history or (question == self.groups and not ask.request.query_params.get("step"))

    def routes(self) -> dict[str, Callable[[Ask], Any]]:
        run, at = "/api/runs/{run}", "/api/runs/{run}/samples/{split}"
        one = f"{at}/{{step:int}}/{{group:int}}"
        return {
            "/api/runs": self.list_runs,
            "/api/curves": self.curves,
            f"{run}/metrics": self.names,
            f"{run}/config": self.config,
            f"{run}/alerts": self.alerts,
            f"{run}/checkpoints": self.checkpoints,
            f"{run}/samples": self.steps,
            at: self.groups,
            f"{at}/history/{{index:int}}": self.history,
            one: self.group,
            f"{one}/{{sample:int}}/tokens": self.tokens,
            f"{one}/{{sample:int}}/text/{{column}}": self.text,
        }


class Ask:
    """A request's values, each within its limits."""

    seconds = LONGEST_TURN
    """That an answer may take which looks through many files."""

    def __init__(self, request: Any):
        self.request = request

    def path(self, name: str) -> Any:
        return self.request.path_params[name]

    def many(self, name: str) -> list[str]:
        return list(dict.fromkeys(self.request.query_params.getlist(name)))

    def text(self, name: str, longest: int) -> str:
        value = str(self.request.query_params.get(name, ""))
        if len(value) > longest:
            raise Wrong(f"{name} has {len(value)} characters, {longest} are the most.")
        return value

    def number(self, name: str, default: int, most: int = 1 << 31) -> int:
        text = self.request.query_params.get(name, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 12:
            raise Wrong(f"{name}={text[:40]!r} must be a whole number from 0 on.")
        return min(int(text), most)

    def choice(self, name: str, known: Any, default: str) -> str:
        value = self.request.query_params.get(name, default)
        if value not in known:
            raise Wrong(f"{name}={value[:40]!r} is not one of {', '.join(known)}.")
        return str(value)


def build_app(board: Board, *, token: str | None = None, hosts: tuple[str, ...] = LOCAL) -> Any:
    """The application that answers for a board.

    Without a token only requests that name one of `hosts` are answered: a page of another site that points its own name at this
    machine gets nothing.
    """
    applications, routing = _starlette("applications"), _starlette("routing")
    responses, static = _starlette("responses"), _starlette("staticfiles")
    compress = _starlette("middleware.gzip").GZipMiddleware
    quick, searching = Crew(QUICK), Crew(SEARCHING)

    def answers(question: Callable[[Ask], Any]) -> Callable[[Any], Any]:
        async def endpoint(request: Any) -> Any:
            ask = Ask(request)
            crew = searching if board.searches(question, ask) else quick
            status, body = await crew.answer(f"{request.url.path}?{request.url.query}", partial(answer, question, ask), request)
            return responses.Response(body, status, media_type="application/json")

        return endpoint

    def page(_: Any) -> Any:
        return responses.FileResponse(STATIC / "index.html", media_type="text/html")

    routes = [routing.Route(path, answers(question), methods=["GET"]) for path, question in board.routes().items()]
    routes += [
        routing.Route("/", page, methods=["GET"]),
        routing.Mount("/static", app=static.StaticFiles(directory=STATIC)),
    ]
    app = applications.Starlette(routes=routes)
    app.add_middleware(compress, minimum_size=2000, compresslevel=4)
    return Guard(app, token, hosts, responses)


def answer(question: Callable[[Ask], Any], ask: Ask, seconds: float) -> tuple[int, str]:
    """Status and JSON."""
    ask.seconds = seconds
    try:
        return 200, _json(question(ask))
    except NotFound as missing:
        return 404, to_json({"error": str(missing)})
    except Wrong as wrong:
        return 400, to_json({"error": str(wrong)})
    except (Damaged, OSError) as damaged:
        return 500, to_json({"error": str(damaged)})


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, TypeError):  # NaN and the like, which only a slower writer can spell
        return to_json(value)


class Guard:
    """Around everything: who may ask, and the headers that keep a browser from running what it is shown."""

    def __init__(self, app: Any, token: str | None, hosts: tuple[str, ...], responses: Any):
        self.app, self.token, self.hosts, self.responses = app, token, hosts, responses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        refused = self._refused(_starlette("requests").Request(scope))
        await (refused or self.app)(scope, receive, send_with_headers)

    def _refused(self, request: Any) -> Any:
        plain = self.responses.PlainTextResponse
        if self.token is None:
            host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            return None if host in self.hosts else plain("This board answers at http://127.0.0.1 only.\n", 421)
        given = request.query_params.get("token", "")
        if request.url.path == "/" and self._right(given):
            arrived = self.responses.RedirectResponse("/", 303)
            arrived.set_cookie(COOKIE, given, httponly=True, samesite="strict", max_age=30 * 86400)
            return arrived
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._right(request.cookies.get(COOKIE, "")) or self._right(bearer):
            return None
        return plain("Open this page with the token it was started with: /?token=...\n", 401)

    def _right(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _starlette(module: str) -> Any:
    return require(f"starlette.{module}", extra="board", why="strop board")
