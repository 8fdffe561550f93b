"""`strop serve-rm`: a reward model behind HTTP, in OpenRLHF's protocol, with dynamic batching.

    POST /get_reward  {"query": [prompt and response with special tokens], "prompts": [...], "labels": [...]}
    200               {"rewards": [...], "scores": [...], "extra_logs": {"truncated": [...]}}
    GET  /health      {"status": "ok", "queued": 0, ...}

Only `query` is read. Texts of concurrent requests share batches. Errors say why: 400 not JSON, 422 JSON of
another shape, 413 too large, 503 busy (retry later), 500 the model failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Generic, TypeVar

from strop.config.schema.inference import RewardServerConfig, ServerConfig
from strop.config.schema.reward import RewardModelConfig
from strop.extras import require
from strop.rewards.model import TokenScorer, load_model, stored_statistics
from strop.rewards.server_requests import MEGABYTE, RequestRefused, parse_queries, read_body

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SECONDS_UNTIL_RETRY = "1"
Item = TypeVar("Item")
Answer = TypeVar("Answer")


# --- Dynamic batching ---------------------------------------------------------------------------------------


class QueueFull(Exception):
    """The queue has no room for the items."""


@dataclass
class BatcherStats:
    """Counters of a batcher."""

    items: int = 0
    batches: int = 0
    failed: int = 0
    """Items of batches that raised."""
    refused: int = 0
    """Items that did not fit into the queue."""


@dataclass
class DynamicBatcher(Generic[Item, Answer]):
    """Collects items of concurrent requests and calls `answer(items)` in one thread, one batch after the
    other."""

    answer: Callable[[list[Item]], Sequence[Answer]]
    max_batch_size: int
    max_wait: float
    """Seconds that the first item of a batch waits for more items."""
    max_queue: int
    """Items that may wait."""
    stats: BatcherStats = field(default_factory=BatcherStats)

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strop-batch")

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    async def submit(self, items: Sequence[Item]) -> list[Answer]:
        """Return the answers to all items, or raise the error of their batch; QueueFull if they do not
        fit."""
        if len(self) + len(items) > self.max_queue:
            self.stats.refused += len(items)
            raise QueueFull(
                f"{len(self)} texts wait already, and {len(items)} more do not fit into a queue of "
                f"{self.max_queue}"
            )
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        self._arrived.set()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()  # the request has ended: items that still wait are not computed

    async def run(self) -> None:
        """Process batches until cancelled."""
        try:
            while True:
                await self._arrived.wait()
                await self._wait_for_more()
                batch = self._next_batch()
                if batch:
                    await self._process(batch)
        finally:
            self._thread.shutdown(wait=False)

    async def _wait_for_more(self) -> None:
        """Wait up to `max_wait` for more items, unless a batch is full."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.max_wait
        while len(self) < self.max_batch_size:
            remaining = deadline - loop.time()
            if remaining <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), remaining)
            except TimeoutError:
                return

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self.max_batch_size:
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        if self._waiting:
            self._arrived.set()
        else:
            self._arrived.clear()
        return batch

    async def _process(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        items = [item for item, _ in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, items)
            if len(answers) != len(items):
                raise ValueError(f"{len(items)} items were answered with {len(answers)} values.")
        except Exception as error:  # noqa: BLE001 - an error fails this batch only; the server goes on
            self.stats.failed += len(items)
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self.stats.items += len(items)
        self.stats.batches += 1
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


# --- The model ----------------------------------------------------------------------------------------------


@dataclass
class ServedRewardModel:
    """A loaded reward model with its tokenizer: texts in, one number each out."""

    name: str
    model: TokenScorer
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = None
    mean: float = 0.0
    std: float = 1.0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        if not texts:  # a client with several servers may send an empty request to some
            return []
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def score(self, sequences: list[list[int]]) -> list[float]:
        """Return the normalised score of each sequence."""
        return [(float(score) - self.mean) / self.std for score in self.model.score(sequences)]


def load_served_model(config: RewardServerConfig) -> ServedRewardModel:
    """Load the reward model of the configuration; ValueError if the folder has no head with one label."""
    import torch

    from strop.models.build import build_tokenizer, compute_dtype

    server = config.server
    device = torch.device("cpu")
    if server.device != "auto":
        device = torch.device(server.device)
    elif torch.cuda.is_available():
        device = torch.device("cuda")
    settings = RewardModelConfig(
        model=config.model,  # type: ignore[arg-type]
        normalize=server.normalize,
        use_dynamic_bsz=True,
        forward_max_token_len_per_gpu=server.forward_max_token_len_per_gpu,
    )
    model = load_model(settings, device=device, dtype=compute_dtype(server.dtype, device))
    served = ServedRewardModel(str(config.model.path), model, build_tokenizer(config.model))
    if server.normalize:
        served.mean, served.std = stored_statistics(settings, model, key="server.normalize")
    text_config = model.module.config.get_text_config()
    served.max_length = server.max_length or getattr(text_config, "max_position_embeddings", None)
    return served


# --- HTTP ---------------------------------------------------------------------------------------------------


class RewardService:
    """The handlers of the web application, and the state that they share."""

    def __init__(self, model: ServedRewardModel, settings: ServerConfig, responses: ModuleType):
        """`responses` is the module fastapi.responses."""
        self.model = model
        self.settings = settings
        self.responses = responses
        self.truncated = 0
        self.batcher: DynamicBatcher[list[int], float] = DynamicBatcher(
            model.score,
            max_batch_size=settings.max_batch_size,
            max_wait=settings.max_wait_ms / 1000,
            max_queue=settings.max_queue,
        )

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Run the batcher as long as the application runs."""
        worker = asyncio.create_task(self.batcher.run())
        yield
        worker.cancel()

    async def get_reward(self, request: Request) -> Response:
        """Answer POST /get_reward."""
        try:
            return self._json(await self._score(request))
        except RequestRefused as refusal:
            headers = None
            if refusal.status == 413:
                headers = {"Connection": "close"}  # the rest of the body is not read
            return self._json({"error": str(refusal)}, refusal.status, headers)
        except QueueFull as full:
            return self._busy(f"{full}; come back later.")
        except TimeoutError:
            limit = f"{self.settings.timeout:g} seconds (server.timeout)"
            return self._busy(f"No score within {limit}; {len(self.batcher)} texts wait.")
        except Exception as error:  # noqa: BLE001 - an error fails this request only; the server goes on
            log.warning("A request failed: %s: %s", type(error).__name__, error)
            return self._json({"error": f"{type(error).__name__}: {error}"}, 500)

    async def _score(self, request: Request) -> dict[str, object]:
        body = await read_body(request, int(self.settings.max_body_mb * MEGABYTE))
        texts = parse_queries(body, self.settings.max_queue)
        sequences, truncated = await asyncio.to_thread(_encode, self.model, texts)
        self.truncated += sum(truncated)
        scores = await asyncio.wait_for(self.batcher.submit(sequences), self.settings.timeout)
        rewards = [_json_number(score) for score in scores]
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"truncated": truncated}}

    async def health(self, _: Request) -> Response:
        """Answer GET /health."""
        stats = self.batcher.stats
        return self._json(
            {
                "status": "ok",
                "model": self.model.name,
                "max_length": self.model.max_length,
                "queued": len(self.batcher),
                "truncated": self.truncated,
                "mean_batch": stats.items / max(1, stats.batches),
                **asdict(stats),
            }
        )

    def _busy(self, message: str) -> Response:
        return self._json({"error": message}, 503, {"Retry-After": SECONDS_UNTIL_RETRY})

    def _json(
        self, content: dict[str, object], status: int = 200, headers: dict[str, str] | None = None
    ) -> Response:
        response: Response = self.responses.JSONResponse(content, status, headers)
        return response


def build_app(model: ServedRewardModel, settings: ServerConfig) -> FastAPI:
    """Build the web application for a loaded model."""
    fastapi = require("fastapi", extra="serve", why="strop serve-rm")
    responses = require("fastapi.responses", extra="serve", why="strop serve-rm")
    service = RewardService(model, settings, responses)
    app: FastAPI = fastapi.FastAPI(title="strop serve-rm", lifespan=service.lifespan)
    for path in ("/get_reward", "/"):
        app.router.add_route(path, service.get_reward, methods=["POST"])
    app.router.add_route("/health", service.health, methods=["GET"])
    return app


def serve(config: RewardServerConfig) -> None:
    """Load the model and serve requests until the process is stopped."""
    uvicorn = require("uvicorn", extra="serve", why="strop serve-rm")
    settings = config.server
    app = build_app(load_served_model(config), settings)
    server_config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_level="warning", lifespan="on"
    )
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    log.info("%s answers at http://%s:%d/get_reward", config.model.path, settings.host, port)
    uvicorn.Server(server_config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"server.host={host} server.port={port} cannot be used: {error.strerror or error}."
        ) from error


def _encode(model: ServedRewardModel, texts: list[str]) -> tuple[list[list[int]], list[int]]:
    """Return the ids of each text, cut at the end if too long, and 1 for each that was cut."""
    sequences = model.encode(texts)
    for index, ids in enumerate(sequences):
        if not ids:
            raise RequestRefused(422, f"query[{index}] has no tokens.")
    if model.max_length is None:
        return sequences, [0] * len(sequences)
    truncated = [int(len(ids) > model.max_length) for ids in sequences]
    return [ids[: model.max_length] for ids in sequences], truncated


def _json_number(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have; the client masks such samples."""
    if math.isfinite(value):
        return value
    return None
