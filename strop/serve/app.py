"""The HTTP side of `strop serve-train`: paths, keys of users, limits on bodies, and errors with a reason.

Status codes: 400 a request that cannot be understood or carried out, 401 no or an unknown key, 404 nothing of
that name that the user owns, 408 a future that is not there yet, 410 what is not kept any more (the client
asks again), 413 too large, 421 a host name that this service does not have, 429 too many requests at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from strop.config.schema.training_service import ServiceConfig
from strop.extras import require
from strop.rewards.server_requests import MEGABYTE, RequestRefused, read_body
from strop.run.atomic_files import to_json
from strop.serve.accounts import Accounts, is_this_machine
from strop.serve.listing import Listing
from strop.serve.requests import Fields
from strop.serve.service import TrainingService
from strop.serve.store import Stored
from strop.serve.trainer import LOAD, OPTIM_STEP, PROTO, SAVE, SAVE_SAMPLER, UNLOAD

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

log = logging.getLogger(__name__)

PROTO_TYPE = "application/x-protobuf"
API = "/api/v1"
Handler = Callable[["Request", str], Awaitable["Response"]]
"""(request, user) -> answer."""


def max_body(settings: ServiceConfig) -> int:
    """Bytes that the body of a request may have."""
    return int(settings.max_body_mb * MEGABYTE)


class ServiceApp:
    """The handlers of the web application."""

    def __init__(self, service: TrainingService, accounts: Accounts, responses: ModuleType) -> None:
        """`responses` is the module fastapi.responses."""
        self.service = service
        self.listing = Listing(service)
        self.accounts = accounts
        self.responses = responses
        self.max_body = max_body(service.settings)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        async with self.service.running():
            yield

    # --- guard ----------------------------------------------------------------------------------------------

    def guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Check host and key before a handler, and turn refusals into answers."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request, self._user(request))
            except RequestRefused as refusal:
                headers = None
                if refusal.status == 413:
                    headers = {"Connection": "close"}  # the rest of the body is not read
                return self._json({"detail": str(refusal)}, refusal.status, headers)
            except OSError as error:
                log.error("A request failed: %s", error)
                return self._json({"detail": f"The service cannot use its disk: {error}"}, 500)

        return endpoint

    def _user(self, request: Request) -> str:
        if not self.accounts.are_required:
            # A page of another site that points its own name at this machine gets nothing.
            host = request.headers.get("host", "")
            name = host.rpartition(":")[0] or host
            if not is_this_machine(name.strip("[]")):
                raise RequestRefused(421, "This service answers at http://127.0.0.1 only.")
        key = request.headers.get("x-api-key", "")
        if not key:
            key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return self.accounts.user_of(key)

    async def _fields(self, request: Request) -> Fields:
        return Fields.read(await self._body(request))

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestRefused(400, "Compressed requests are not read.")
        return await read_body(request, self.max_body)

    def _json(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        response: Response = self.responses.Response(
            to_json(content), status, headers, media_type="application/json"
        )
        return response

    # --- configuration of the client ------------------------------------------------------------------------

    async def client_config(self, request: Request, user: str) -> Response:
        """Flags of the client: chunks of a batch come in order, and never exceed the limit on bodies."""
        chunk = min(5_000_000, self.max_body // 2)
        return self._json(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": False,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_bytes_count": chunk,
                "create_model_via_load_weights": False,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
            }
        )

    async def dynamic_config(self, request: Request, user: str) -> Response:
        return self._json({"sample_cancel_enabled": True})

    async def capabilities(self, request: Request, user: str) -> Response:
        return self._json(self.listing.capabilities())

    async def telemetry(self, request: Request, user: str) -> Response:
        """The client reports its errors here; nothing is kept."""
        await self._body(request)
        return self._json({"status": "accepted"})

    async def health(self, _: Request) -> Response:
        return self._json({"status": "ok"})

    # --- sessions, models, samplers -------------------------------------------------------------------------

    async def create_session(self, request: Request, user: str) -> Response:
        return self._json(self.service.create_session(user, await self._fields(request)))

    async def heartbeat(self, request: Request, user: str) -> Response:
        self.service.session(user, (await self._fields(request)).text("session_id"))
        return self._json({"type": "session_heartbeat"})

    async def finish_session(self, request: Request, user: str) -> Response:
        await self._body(request)
        self.service.finish_session(user, request.path_params["session_id"])
        return self._json({})

    async def create_model(self, request: Request, user: str) -> Response:
        return self._json(self.service.create_model(user, await self._fields(request)))

    async def get_info(self, request: Request, user: str) -> Response:
        return self._json(self.listing.model_info(user, (await self._fields(request)).text("model_id")))

    async def create_sampler(self, request: Request, user: str) -> Response:
        return self._json(self.service.create_sampler(user, await self._fields(request)))

    async def training_pass(self, request: Request, user: str) -> Response:
        body = await self._body(request)
        if request.headers.get("content-type", "").partition(";")[0] != PROTO_TYPE:
            raise RequestRefused(400, f"Training data must come as {PROTO_TYPE}.")
        return self._json(self.service.training_pass(user, body))

    def model_request(self, kind: str) -> Handler:
        async def handler(request: Request, user: str) -> Response:
            body = await self._body(request)
            return self._json(self.service.model_request(user, kind, Fields.read(body), body))

        return handler

    async def sample(self, request: Request, user: str) -> Response:
        return self._json(self.service.sample(user, await self._fields(request)))

    async def cancel(self, request: Request, user: str) -> Response:
        self.service.cancel_sample(user, (await self._fields(request)).text("request_id"))
        return self._json({})

    async def retrieve(self, request: Request, user: str) -> Response:
        request_id = (await self._fields(request)).text("request_id")
        answer = await self.service.retrieve(user, request_id)
        if answer is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return self._json(waiting, 408)
        return self._stored(answer)

    def _stored(self, answer: Stored) -> Response:
        if answer.kind == PROTO:
            response: Response = self.responses.Response(answer.body, media_type=PROTO_TYPE)
            return response
        return self._json(json.loads(answer.body))

    # --- looking up -----------------------------------------------------------------------------------------

    async def weights_info(self, request: Request, user: str) -> Response:
        return self._json(self.listing.weights_info(user, await self._fields(request)))

    async def training_runs(self, request: Request, user: str) -> Response:
        numbers = []
        for name, default in (("offset", "0"), ("limit", "20")):
            text = request.query_params.get(name, default)
            if not text.isdecimal() or len(text) > 9:
                raise RequestRefused(400, f"{name} must be a whole number.")
            numbers.append(int(text))
        return self._json(self.listing.training_runs(user, *numbers))

    async def training_run(self, request: Request, user: str) -> Response:
        return self._json(self.listing.training_run(user, request.path_params["model_id"]))

    async def checkpoints(self, request: Request, user: str) -> Response:
        return self._json(self.listing.checkpoints(user, request.path_params["model_id"]))

    async def delete_checkpoint(self, request: Request, user: str) -> Response:
        place = request.path_params
        await self.listing.delete_checkpoint(user, place["model_id"], place["kind"], place["name"])
        return self._json({})

    async def session(self, request: Request, user: str) -> Response:
        return self._json(self.listing.session(user, request.path_params["session_id"]))

    async def sampler(self, request: Request, user: str) -> Response:
        return self._json(self.listing.sampler(user, request.path_params["sampler_id"]))

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path, handler."""
        runs = "/training_runs"
        found: list[tuple[str, str, Handler]] = [
            ("POST", "/client/config", self.client_config),
            ("POST", "/client/dynamic_config", self.dynamic_config),
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/telemetry", self.telemetry),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", self.heartbeat),
            ("POST", "/sessions/{session_id}/finish", self.finish_session),
            ("GET", "/sessions/{session_id}", self.session),
            ("POST", "/create_model", self.create_model),
            ("POST", "/get_info", self.get_info),
            ("POST", "/forward_backward", self.training_pass),
            ("POST", "/create_sampling_session", self.create_sampler),
            ("GET", "/samplers/{sampler_id}", self.sampler),
            ("POST", "/asample", self.sample),
            ("POST", "/cancel_future", self.cancel),
            ("POST", "/retrieve_future", self.retrieve),
            ("POST", "/weights_info", self.weights_info),
            ("GET", runs, self.training_runs),
            ("GET", f"{runs}/{{model_id}}", self.training_run),
            ("GET", f"{runs}/{{model_id}}/checkpoints", self.checkpoints),
            ("DELETE", f"{runs}/{{model_id}}/checkpoints/{{kind}}/{{name}}", self.delete_checkpoint),
        ]
        for kind in (OPTIM_STEP, SAVE, SAVE_SAMPLER, LOAD, UNLOAD):
            found.append(("POST", f"/{kind}", self.model_request(kind)))
        return found


def build_app(service: TrainingService, accounts: Accounts) -> FastAPI:
    """The web application of a service."""
    fastapi = require("fastapi", extra="serve", why="strop serve-train")
    responses = require("fastapi.responses", extra="serve", why="strop serve-train")
    handlers = ServiceApp(service, accounts, responses)
    app: FastAPI = fastapi.FastAPI(
        title="strop serve-train", lifespan=handlers.lifespan, openapi_url=None, docs_url=None
    )
    app.router.add_route(f"{API}/healthz", handlers.health, methods=["GET"])
    for method, path, handler in handlers.routes():
        app.router.add_route(f"{API}{path}", handlers.guarded(handler), methods=[method])
    return app
