"""A host without a model, whose numbers can be computed by hand, and a service on a real port."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from strop.config.schema.training_service import ServiceConfig, ServiceModelConfig, TrainingServiceConfig
from strop.serve.accounts import Accounts
from strop.serve.app import build_app
from strop.serve.host import HostFacts, PassResult
from strop.serve.losses import ServedLoss, summed_loss
from strop.serve.messages import LossDatum, SampledSequence
from strop.serve.requests import AdamStep, SampleRequest
from strop.serve.start import build_service
from strop.serve.wire import Message, Writer

BASE = "tiny/base"


class FakeHost:
    """An adapter is one number w; the log-prob of a token is w - token / 100. A step moves w by lr * slope."""

    facts = HostFacts(vocabulary=100, context=32, architecture="fake")

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, float]] = {}
        self.samplers: dict[str, float] = {}
        self.calls: list[tuple[str, str]] = []
        self.sampled_together: list[int] = []
        self.sampling = 0
        self.hold: threading.Event | None = None
        """Training waits for it."""

    def add(self, adapter: str, *, rank: int, seed: int) -> None:
        self.calls.append(("add", adapter))
        self.adapters[adapter] = {"w": -1.0 - seed % 7, "slope": 0.0, "steps": 0.0}

    def remove(self, adapter: str) -> None:
        self.calls.append(("remove", adapter))
        del self.adapters[adapter]

    def training_pass(
        self,
        adapter: str,
        data: Sequence[LossDatum],
        loss: ServedLoss,
        settings: Mapping[str, float],
        *,
        backward: bool,
    ) -> PassResult:
        assert self.sampling == 0
        if self.hold is not None:
            assert self.hold.wait(10)
        self.calls.append(("pass", adapter))
        own = self.adapters[adapter]
        w = torch.tensor(own["w"], dtype=torch.float64, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        rows = []
        for datum in data:
            log_probs = w - torch.tensor(datum.targets) / 100
            rows.append(log_probs.detach().numpy().astype(np.float32))
            total = total + summed_loss(loss, settings, log_probs, datum.inputs)
        if backward:
            total.backward()
            assert w.grad is not None
            own["slope"] += float(w.grad)
        return PassResult(float(total.detach()), rows)

    def step(self, adapter: str, settings: AdamStep) -> dict[str, float]:
        self.calls.append(("step", adapter))
        own = self.adapters[adapter]
        own["w"] -= settings.learning_rate * own["slope"]
        own["slope"] = 0.0
        own["steps"] += 1
        return {"grad_norm": own["steps"]}

    def save(self, adapter: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(self.adapters[adapter]))

    def load(self, adapter: str, folder: Path, *, optimizer: bool) -> None:
        self.calls.append(("load", adapter))
        found = json.loads((folder / "state.json").read_text())
        steps = found["steps"] if optimizer else 0.0
        self.adapters[adapter] = {"w": found["w"], "slope": 0.0, "steps": steps}

    save_sampler = save

    def publish(self, sampler: str, folder: Path) -> None:
        self.samplers[sampler] = json.loads((folder / "state.json").read_text())["w"]

    def withdraw(self, sampler: str) -> None:
        del self.samplers[sampler]

    async def sample(self, sampler: str | None, request: SampleRequest, seed: int) -> list[SampledSequence]:
        w = 0.0 if sampler is None else self.samplers[sampler]
        self.sampling += 1
        self.sampled_together.append(self.sampling)
        await asyncio.sleep(0)
        self.sampling -= 1
        tokens = [(request.prompt[-1] + 1 + step) % 100 for step in range(request.max_tokens)]
        log_probs = [w - token / 100 for token in tokens]
        return [SampledSequence(tokens, log_probs, "length")] * request.n

    def score(self, sampler: str | None, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        w = 0.0 if sampler is None else self.samplers[sampler]
        return [np.array([w - token / 100 for token in prompt[1:]], np.float32) for prompt in prompts]

    def close(self) -> None:
        self.calls.append(("close", ""))


def service_config(state: Path, **settings: Any) -> TrainingServiceConfig:
    return TrainingServiceConfig(
        model=ServiceModelConfig(path=BASE), server=ServiceConfig(state_dir=str(state), **settings)
    )


class Running:
    """A service on a port, and requests to it."""

    def __init__(self, state: Path, users: Mapping[str, str] | None = None, **settings: Any) -> None:
        self.host = FakeHost()
        self.token = next(iter(users), "tml-any") if users else "tml-any"
        config = service_config(state, **settings)

        self.service = build_service(config, self.host)
        app = build_app(self.service, Accounts(users or {}))
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def call(
        self,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/x-protobuf" if path == "forward_backward" else "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {"Content-Type": kind, "X-API-Key": self.token if token is None else token, **headers}
        method = "GET" if body is None else "POST"
        connection.request(method, f"/api/v1/{path}", sent if body is not None else None, given)
        reply = connection.getresponse()
        content = reply.read()
        if reply.headers["Content-Type"] == "application/x-protobuf":
            return reply.status, Message(content)
        return reply.status, json.loads(content)

    def ok(self, path: str, body: bytes | Mapping[str, Any] | None = None, **more: Any) -> Any:
        status, content = self.call(path, body, **more)
        assert status == 200, (status, content)
        return content

    def answer(self, future: Mapping[str, Any], **more: Any) -> Any:
        return self.ok("retrieve_future", {"request_id": future["request_id"]}, **more)

    def session(self, **more: Any) -> str:
        content = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        return str(self.ok("create_session", content, **more)["session_id"])

    def model(self, session: str, number: int = 0, seed: int = 0, rank: int = 4, **more: Any) -> str:
        content = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": BASE,
            "lora_config": {"rank": rank, "seed": seed},
        }
        return str(self.answer(self.ok("create_model", content, **more), **more)["model_id"])

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=10)


def tensor(values: Sequence[float], kind: str = "f4") -> Writer:
    array = np.asarray(values, f"<{kind}")
    return Writer().raw(1, array.tobytes()).integer(3, 1 if kind == "f4" else 2).integer(4, len(values))


def pass_body(
    model: str,
    seq: int,
    loss: str = "cross_entropy",
    tokens: Sequence[int] = (1, 2, 3),
    targets: Sequence[int] = (2, 3, 4),
    *,
    forward_only: bool = False,
    settings: Mapping[str, float] | None = None,
    **inputs: Sequence[float],
) -> bytes:
    """A ForwardBackwardRequest of one datum."""
    datum = Writer().message(1, Writer().message(1, Writer().raw(1, np.asarray(tokens, "<i4").tobytes())))
    if not inputs:
        inputs = {"weights": [1.0] * len(targets)}
    datum.message(2, Writer().text(1, "target_tokens").message(2, tensor(targets, "i8")))
    for name, values in inputs.items():
        datum.message(2, Writer().text(1, name).message(2, tensor(values)))
    request = Writer().text(1, model).integer(2, seq).message(3, datum).text(4, loss)
    request.map_of_doubles(5, settings or {})
    return request.integer(6, int(forward_only)).done()


def metrics_of(output: Message) -> dict[str, float]:
    return {key: entry.double(2) for key, entry in output.entries(3)}


def log_probs_of(output: Message) -> list[float]:
    (record,) = output.messages(2)
    (field,) = list(record.entries(2))
    values: list[float] = np.frombuffer(field[1].message(2).raw(1), "<f4").tolist()
    return values
