"""A reward model behind HTTP, in OpenRLHF's protocol: `strop serve-rm`.

    POST /get_reward  {"query": [prompt and response, special tokens included], "prompts": [...], "labels": [...]}
    200               {"rewards": [...], "scores": [...], "extra_logs": {"truncated": [...]}}
    GET  /health      {"status": "ok", "queued": 0, ...}

Only `query` is read. Texts of all requests that arrive together share batches. What is refused says why: 400 no JSON, 422 JSON
of another shape, 413 too large, 503 too busy (come back later), 500 the model failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from strop.config.schema.inference import RewardServer, ServerSettings
from strop.config.schema.reward import RewardModel
from strop.extras import require
from strop.rewards.batching import Batcher, QueueFull
from strop.rewards.model import TokenScorer, load_model, stored_statistics

log = logging.getLogger(__name__)

MEGABYTE = 1 << 20
DRAINED = 8
"""A body up to so many times the limit is read to its end, so that its sender hears why it is refused."""
SECONDS_UNTIL_RETRY = "1"


class Refused(Exception):
    """An HTTP status and what to say."""

    def __init__(self, status: int, said: str):
        self.status = status
        super().__init__(said)


@dataclass
class Judge:
    """Text in, one number out."""

    name: str
    model: TokenScorer
    tokenizer: Any
    max_length: int | None = None
    mean: float = 0.0
    std: float = 1.0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # clients with several servers ask all of them, some about nothing
            return []
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def score(self, sequences: list[list[int]]) -> list[float]:
        return [(float(score) - self.mean) / self.std for score in self.model.score(sequences)]


def load_judge(config: RewardServer) -> Judge:
    """The reward model of the configuration; a folder without a head of one label is refused."""
    import torch

    from strop.models.build import build_tokenizer, compute_dtype

    server = config.server
    name = ("cuda" if torch.cuda.is_available() else "cpu") if server.device == "auto" else server.device
    device = torch.device(name)
    settings = RewardModel(
        model=config.model,  # type: ignore[arg-type]
        normalize=server.normalize,
        use_dynamic_bsz=True,
        forward_max_token_len_per_gpu=server.forward_max_token_len_per_gpu,
    )
    model = load_model(settings, device=device, dtype=compute_dtype(server.dtype, device))
    mean, std = stored_statistics(settings, model) if server.normalize else (0.0, 1.0)
    positions = getattr(model.module.config.get_text_config(), "max_position_embeddings", None)
    return Judge(str(config.model.path), model, build_tokenizer(config.model), server.max_length or positions, mean, std)


def build_app(judge: Judge, settings: ServerSettings) -> Any:
    """The web application over a loaded model."""
    fastapi = require("fastapi", extra="serve", why="strop serve-rm")
    responses = require("fastapi.responses", extra="serve", why="strop serve-rm")
    batcher: Batcher[list[int], float] = Batcher(
        judge.score, most=settings.max_batch_size, wait=settings.max_wait_ms / 1000, room=settings.max_queue
    )
    truncated = 0

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()

    async def get_reward(request: Any) -> Any:
        nonlocal truncated
        try:
            texts = queries_in(await read_body(request, int(settings.max_body_mb * MEGABYTE)), settings.max_queue)
            sequences, cut = await asyncio.to_thread(_prepare, judge, texts)
            truncated += sum(cut)
            rewards = [_number(value) for value in await asyncio.wait_for(batcher.ask(sequences), settings.timeout)]
        except Refused as refusal:
            hang_up = {"Connection": "close"} if refusal.status == 413 else None  # the rest of a body is not waited for
            return responses.JSONResponse({"error": str(refusal)}, refusal.status, hang_up)
        except QueueFull as full:
            return responses.JSONResponse({"error": f"{full}; come back later."}, 503, {"Retry-After": SECONDS_UNTIL_RETRY})
        except TimeoutError:
            said = f"No score within {settings.timeout:g} seconds (server.timeout); {len(batcher)} texts wait."
            return responses.JSONResponse({"error": said}, 503, {"Retry-After": SECONDS_UNTIL_RETRY})
        except Exception as error:  # noqa: BLE001 - the border of one request: the others are served
            log.warning("A request failed: %s: %s", type(error).__name__, error)
            return responses.JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return responses.JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": {"truncated": cut}})

    async def health(_: Any) -> Any:
        served = batcher.served
        return responses.JSONResponse(
            {
                "status": "ok",
                "model": judge.name,
                "max_length": judge.max_length,
                "queued": len(batcher),
                "truncated": truncated,
                "mean_batch": served.items / max(1, served.batches),
                **asdict(served),
            }
        )

    app = fastapi.FastAPI(title="strop serve-rm", lifespan=life)
    for path in ("/get_reward", "/"):
        app.router.add_route(path, get_reward, methods=["POST"])
    app.router.add_route("/health", health, methods=["GET"])
    return app


async def read_body(request: Any, limit: int) -> bytes:
    """The body of a request; one over the limit is never held in memory."""
    kept, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            kept.append(piece)
        elif size > DRAINED * limit:
            break
    if size > limit:
        sent = f"{size / MEGABYTE:.1f} MB" if size <= DRAINED * limit else f"more than {DRAINED * limit / MEGABYTE:g} MB"
        raise Refused(413, f"The request has {sent}, the limit is {limit / MEGABYTE:g} MB. Send fewer texts at a time.")
    return b"".join(kept)


def queries_in(body: bytes, most: int) -> list[str]:
    """The texts that a request asks about."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not JSON: {error}") from error
    if not isinstance(content, dict) or "query" not in content:
        held = (
            f"an object with {', '.join(sorted(map(str, content))) or 'nothing'}" if isinstance(content, dict) else "no object"
        )
        raise Refused(422, f'Expected {{"query": [text, ...]}}, got {held}.')
    texts = content["query"]
    if not isinstance(texts, list):
        raise Refused(422, f"query must be a list of texts, it is {type(texts).__name__}.")
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise Refused(422, f"query[{number}] is {'empty' if text == '' else type(text).__name__}; it must be text.")
    if len(texts) > most:
        raise Refused(413, f"{len(texts)} texts in one request; the queue holds {most}. Send fewer texts at a time.")
    return texts


def serve(config: RewardServer) -> None:
    """Load the model and answer until the process is told to stop."""
    uvicorn = require("uvicorn", extra="serve", why="strop serve-rm")
    app = build_app(load_judge(config), config.server)
    settings = config.server
    listening = uvicorn.Config(app, host=settings.host, port=settings.port, log_level="warning", lifespan="on")
    door = _listen(settings.host, settings.port)
    log.info("%s answers at http://%s:%d/get_reward", config.model.path, settings.host, door.getsockname()[1])
    uvicorn.Server(listening).run(sockets=[door])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise ValueError(f"server.host={host} server.port={port} cannot be used: {error.strerror or error}.") from error


def _prepare(judge: Judge, texts: list[str]) -> tuple[list[list[int]], list[int]]:
    """Ids, and 1 for each text that was cut: like the model in the loop, the server leaves out the end of what is too long."""
    sequences = judge.encode(texts)
    for number, ids in enumerate(sequences):
        if not ids:
            raise Refused(422, f"query[{number}] has no tokens.")
    if judge.max_length is None:
        return sequences, [0] * len(sequences)
    return [ids[: judge.max_length] for ids in sequences], [int(len(ids) > judge.max_length) for ids in sequences]


def _number(value: float) -> float | None:
    """JSON has no NaN; null is no number, so the client masks the sample."""
    return value if math.isfinite(value) else None
