"""The web application of the board: routes that read, answered in threads so that a slow disk blocks no
others, and one that keeps notes on runs."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, cast

from strop.board import describe
from strop.board.curves import Curve, MetricFile, MetricStore, curves
from strop.board.histograms import histograms
from strop.board.notes import BadNote, answer_notes, parse_notes, write_notes
from strop.board.run_index import METRICS, NotFound, RunFolder, RunIndex, StepListingCache
from strop.board.sample_file import SHOWN, SORTED, DamagedSampleFile
from strop.board.sample_pages import Query, SampleFolder, SearchMissCache
from strop.board.worker_pool import MAX_SEARCH_SECONDS, QUICK_THREADS, SEARCH_THREADS, WorkerPool
from strop.extras import require
from strop.run.atomic_files import to_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
COOKIE = "strop_board"
LOCAL = ("127.0.0.1", "localhost", "[::1]")
MAX_POINTS = 2000
MAX_CURVES = 400
MAX_PAGE_SIZE = 100
MAX_SEARCH_LENGTH = 200
MAX_PATH_LENGTH = 2000
MAX_NUMBER = 1 << 31
FRESH = 1.0
"""Seconds for which a list of runs is reused."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


Question: TypeAlias = "Callable[[BoardRequest], object]"
"""A route: request values -> a plain value for JSON."""


class BadRequest(ValueError):
    """A request with invalid values."""


class Board:
    """Answers requests about the runs under a folder, as plain values for JSON. It writes notes on runs, and
    with `read_only` nothing at all."""

    def __init__(self, root: Path, *, read_only: bool = False):
        self.read_only = read_only
        self.runs = RunIndex(root)
        self.store = MetricStore()
        self.listings = StepListingCache()
        self.misses = SearchMissCache()
        self._listing = threading.Lock()
        self._listed: tuple[float, object] = (0.0, None)

    def list_runs(self, request: BoardRequest | None = None) -> object:
        """Every reader asks for this every few seconds: one answer serves all who ask at about the same
        time."""
        with self._listing:
            until, listed = self._listed
            if listed is None or time.monotonic() >= until:
                found = [self._summary(run) for run in self.runs.all().values()]
                listed = {"root": self.runs.root.name, "runs": found}
                self._listed = (time.monotonic() + FRESH, listed)
        return listed

    def _summary(self, run: RunFolder) -> dict[str, object]:
        try:
            return describe.summary(run, self.store, self.listings)
        except (OSError, ValueError, TypeError, RecursionError) as problem:  # files that no run writes
            return describe.broken_summary(run, f"The run cannot be read: {problem}")

    def note(self, run_id: str, body: bytes) -> None:
        """Keep notes on a run."""
        if self.read_only:
            raise BadNote("This board was started with --read-only and keeps no notes.", 403)
        run = self.runs.get(run_id)
        notes = parse_notes(body)
        with self._listing:  # two writers at a time would replace each other's unfinished file
            write_notes(run, notes)
            self._listed = (0.0, None)

    def names(self, request: BoardRequest) -> object:
        """Metrics of a run."""
        path = self.runs.get(request.path("run")).file(METRICS)
        return {"metrics": self.store.ask(path, lambda file: sorted(file.columns))}

    def curves(self, request: BoardRequest) -> object:
        runs = request.many("run")
        names = request.many("metric")
        points = request.number("points", 400, limit=MAX_POINTS)
        if request.text("whole", 1) == "1" and len(names) == 1:  # for a file: every point of one metric
            points = MAX_NUMBER
        if len(runs) * len(names) > MAX_CURVES:
            raise BadRequest(f"{len(runs)} runs x {len(names)} metrics are more than {MAX_CURVES} curves.")
        stacked = request.text("stacked", 1) == "1"

        def drawn(file: MetricFile) -> dict[str, Curve]:
            return curves(file, names, points, stacked=stacked)

        found: dict[str, dict[str, Curve]] = {}
        problems: list[NotFound | OSError] = []
        for run in runs:
            try:
                found[run] = self.store.ask(self.runs.get(run).file(METRICS), drawn)
            except (NotFound, OSError) as problem:  # the list of runs reports it; the others are drawn
                problems.append(problem)
        if problems and not found:
            raise problems[0]
        return found

    def config(self, request: BoardRequest) -> object:
        return describe.config(self.runs.get(request.path("run")))

    def alerts(self, request: BoardRequest) -> object:
        return describe.alerts(self.runs.get(request.path("run")))

    def checkpoints(self, request: BoardRequest) -> object:
        return describe.checkpoints(self.runs.get(request.path("run")))

    def steps(self, request: BoardRequest) -> object:
        """Steps of which samples are there."""
        return self._samples(request).steps()

    def groups(self, request: BoardRequest) -> object:
        query = Query(
            show=request.choice("show", SHOWN, "all"),
            sort=request.choice("sort", SORTED, "order"),
            search=request.text("search", MAX_SEARCH_LENGTH),
            offset=request.number("offset", 0),
            limit=request.number("limit", 30, limit=MAX_PAGE_SIZE),
        )
        samples = self._samples(request)
        split = request.path("split")
        if request.text("step", 20):
            try:
                return samples.page(split, request.number("step", 0), query)
            except DamagedSampleFile as damaged:
                return {"damaged": [str(damaged)]}
        start = None
        if request.text("from", 20):
            start = (request.number("from", 0), query.offset)
        return samples.scan(split, query, start, request.seconds)

    def group(self, request: BoardRequest) -> object:
        return self._samples(request).group(
            request.path("split"), request.index("step"), request.index("group")
        )

    def tokens(self, request: BoardRequest) -> object:
        place = (
            request.path("split"),
            request.index("step"),
            request.index("group"),
            request.index("sample"),
        )
        return self._samples(request).tokens(*place, request.number("start", 0))

    def text(self, request: BoardRequest) -> object:
        place = (
            request.path("split"),
            request.index("step"),
            request.index("group"),
            request.index("sample"),
        )
        return self._samples(request).text(*place, request.path("column"), request.number("start", 0))

    def history(self, request: BoardRequest) -> object:
        return self._samples(request).history(
            request.path("split"), request.index("index"), request.text("source", 1000), request.seconds
        )

    def histograms(self, request: BoardRequest) -> object:
        return histograms(self._samples(request), request.path("split"), request.seconds)

    def _samples(self, request: BoardRequest) -> SampleFolder:
        return SampleFolder(self.runs.get(request.path("run")), self.listings, self.misses)

    def searches(self, question: Question, request: BoardRequest) -> bool:
        """Whether an answer takes many files."""
        if question == self.groups:
            return not request.query.get("step")
        return question in (self.history, self.histograms)

    def routes(self) -> dict[str, Question]:
        run = "/api/runs/{run}"
        at = f"{run}/samples/{{split}}"
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
            f"{at}/histograms": self.histograms,
            one: self.group,
            f"{one}/{{sample:int}}/tokens": self.tokens,
            f"{one}/{{sample:int}}/text/{{column}}": self.text,
        }


class BoardRequest:
    """The values of a request, each within its limits."""

    seconds = MAX_SEARCH_SECONDS
    """Seconds that a search through many files may take."""

    def __init__(self, request: Request):
        self.query = request.query_params
        self._path = request.path_params

    def path(self, name: str) -> str:
        """A text in the path."""
        return str(self._path[name])

    def index(self, name: str) -> int:
        """A number in the path."""
        value = int(self._path[name])
        if value > MAX_NUMBER:
            raise BadRequest(f"{name} is over {MAX_NUMBER}.")
        return value

    def many(self, name: str) -> list[str]:
        return list(dict.fromkeys(self.query.getlist(name)))

    def text(self, name: str, max_length: int) -> str:
        value = str(self.query.get(name, ""))
        if len(value) > max_length:
            raise BadRequest(f"{name} has {len(value)} characters, {max_length} are the most.")
        return value

    def number(self, name: str, default: int, limit: int = MAX_NUMBER) -> int:
        text = self.query.get(name, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 12:
            raise BadRequest(f"{name}={text[:40]!r} must be a whole number from 0 on.")
        return min(int(text), limit)

    def choice(self, name: str, known: Collection[str], default: str) -> str:
        value = self.query.get(name, default)
        if value not in known:
            raise BadRequest(f"{name}={value[:40]!r} is not one of {', '.join(known)}.")
        return str(value)


def build_app(board: Board, *, token: str | None = None, hosts: tuple[str, ...] = LOCAL) -> ASGIApp:
    """The application that answers for a board.

    Without a token only requests that name one of `hosts` are answered: a page of another site that points
    its own name at this machine gets nothing.
    """
    applications = _starlette("applications")
    routing = _starlette("routing")
    responses = _starlette("responses")
    static = _starlette("staticfiles")
    compress = _starlette("middleware.gzip").GZipMiddleware
    quick = WorkerPool(QUICK_THREADS)
    searching = WorkerPool(SEARCH_THREADS)

    def answers(question: Question) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            values = BoardRequest(request)
            pool = searching if board.searches(question, values) else quick
            status, body = await pool.answer(
                f"{request.url.path}?{request.url.query}", partial(answer, question, values), request
            )
            # "replace": names of folders and metrics may hold bytes that are no text.
            content = body.encode("utf-8", "replace")
            return responses.Response(content, status, media_type="application/json")

        return endpoint

    def page(_: Request) -> Response:
        return responses.FileResponse(STATIC / "index.html", media_type="text/html")

    routes = []
    for path, question in board.routes().items():
        routes.append(routing.Route(path, answers(question), methods=["GET"]))

    async def note(request: Request) -> Response:
        status, body = await answer_notes(request, board.note)
        return responses.Response(body, status, media_type="application/json")

    routes.append(routing.Route("/api/runs/{run}/notes", note, methods=["POST"]))
    routes.append(routing.Route("/", page, methods=["GET"]))
    routes.append(routing.Mount("/static", app=static.StaticFiles(directory=STATIC)))
    app = applications.Starlette(routes=routes)
    app.add_middleware(compress, minimum_size=2000, compresslevel=4)
    return AccessGuard(app, token, hosts, responses)


def answer(question: Question, request: BoardRequest, seconds: float) -> tuple[int, str]:
    """Status and JSON body of an answer."""
    request.seconds = seconds
    try:
        return 200, _json(question(request))
    except NotFound as missing:
        return 404, to_json({"error": str(missing)})
    except BadRequest as wrong:
        return 400, to_json({"error": str(wrong)})
    except (DamagedSampleFile, OSError, RecursionError) as damaged:
        return 500, to_json({"error": str(damaged)})


def _json(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, TypeError):  # NaN and infinity, which only the slower to_json can write
        return to_json(value)


class AccessGuard:
    """ASGI middleware: checks the token or the host, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: tuple[str, ...], responses: ModuleType):
        self.app = app
        self.token = token
        self.hosts = hosts
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        refused = self._refused(_starlette("requests").Request(scope))
        await (refused or self.app)(scope, receive, send_with_headers)

    def _refused(self, request: Request) -> Response | None:
        """The answer to a request that is not allowed; None where it is."""
        plain = self.responses.PlainTextResponse
        if len(request.url.path) > MAX_PATH_LENGTH:
            return cast("Response", plain(f"The path is longer than {MAX_PATH_LENGTH} characters.\n", 400))
        if self.token is None:
            host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            if host in self.hosts:
                return None
            return cast("Response", plain("This board answers at http://127.0.0.1 only.\n", 421))
        given = request.query_params.get("token", "")
        if request.url.path == "/" and self._is_token(given):
            redirect: Response = self.responses.RedirectResponse("/", 303)
            redirect.set_cookie(COOKIE, given, httponly=True, samesite="strict", max_age=30 * 86400)
            return redirect
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer):
            return None
        return cast(
            "Response", plain("Open this page with the token it was started with: /?token=...\n", 401)
        )

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _starlette(module: str) -> ModuleType:
    return require(f"starlette.{module}", extra="board", why="strop board")
