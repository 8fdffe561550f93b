"""A real server on a real port: the protocol, batching, limits, and everything that can be wrong with a request."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from strop.config.schema.inference import ServerConfig
from strop.rewards.base import build_samples
from strop.rewards.remote import RewardServerClient
from strop.rewards.server import DynamicBatcher, QueueFull, ServedRewardModel, build_app
from strop.rewards.server_requests import RequestRefused, parse_queries
from tests.rewards.scene import TOKENIZER, scorer, trajectory


class Lengths:
    """A model whose score is the number of tokens; it remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.failing = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def score(self, sequences: list[list[int]]) -> list[float]:
        self.batches.append(len(sequences))
        assert self.may_answer.wait(100)
        if self.failing:
            raise RuntimeError("out of memory")
        return [float("nan") if len(ids) == 13 else float(len(ids)) for ids in sequences]


class Running:
    def __init__(self, model: Any, **settings: Any):
        self.model = model
        judge = ServedRewardModel("lengths", model, TOKENIZER, max_length=settings.pop("tokens", None))
        app = build_app(judge, ServerConfig(**settings))
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/get_reward"

    def post(self, body: bytes | Any, path: str = "/get_reward") -> tuple[int, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    def health(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=60)


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(model: Any = None, **settings: Any) -> Running:
        started.append(Running(model or Lengths(), **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_the_protocol(serve: Any) -> None:
    server = serve(tokens=10)
    status, reply = server.post({"query": ["ab", "abcdefghijklm"], "prompts": ["a", "a"], "labels": ["", ""]})
    assert (status, reply) == (
        200,
        {"rewards": [2.0, 10.0], "scores": [2.0, 10.0], "extra_logs": {"truncated": [0, 1]}},
    )
    assert server.post({"query": ["abc"]}, "/")[1]["rewards"] == [3.0]
    assert server.post({"query": []}) == (200, {"rewards": [], "scores": [], "extra_logs": {"truncated": []}})
    health = server.health()
    assert (
        health["status"] == "ok"
        and health["items"] == 3
        and health["truncated"] == 1
        and health["queued"] == 0
    )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b'{"query": ["a"', 400, "not JSON"),
        (b"\xff\xfe{}", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'["a"]', 422, "no object"),
        (b"{}", 422, 'Expected {"query": [text, ...]}'),
        ({"quary": ["a"]}, 422, "an object with quary"),
        ({"query": "a"}, 422, "query must be a list of texts, it is str"),
        ({"query": ["a", 5]}, 422, "query[1] is int"),
        ({"query": ["a", None]}, 422, "query[1] is NoneType"),
        ({"query": ["", "a"]}, 422, "query[0] is empty"),
        ({"query": ["a"] * 101}, 413, "101 texts in one request; the queue holds 100"),
        ({"query": ["x" * 10_000_000]}, 413, "the limit is 2 MB"),
        (
            b'{"query": ["a", "x\\ud800"]}',
            422,
            "query[1] holds half of a surrogate pair (U+D800 at character 1)",
        ),
        (b'{"\\ud800": 1}', 422, "an object with \\ud800"),
        (b'{"query": NaN}', 422, "it is float"),
        (b'{"query": [1e999]}', 422, "query[0] is float"),
        (b'{"query": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b'{"query": ["\xff"]}', 400, "not JSON"),
        (b'{"query": ["\xed\xa0\x80"]}', 422, "half of a surrogate pair"),
        (b'{"query": ' + b"[" * 300 + b"]" * 300 + b"}", 422, "query[0] is list"),
    ],
    ids=range(21),
)
def test_bad_requests_are_told_what_is_wrong(serve: Any, body: Any, status: int, words: str) -> None:
    server = serve(max_queue=100, max_body_mb=2)
    found, reply = server.post(body)
    assert found == status and words in reply["error"]
    assert server.post({"query": ["abc"]})[1]["rewards"] == [3.0], "the next request is served"


def test_a_body_without_end_is_cut_off(serve: Any) -> None:
    server = serve(max_body_mb=0.1)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
    with pytest.raises(OSError):
        connection.request("POST", "/get_reward", (b"x" * 65536 for _ in range(100_000)), encode_chunked=True)
    assert server.post({"query": ["abc"]})[0] == 200


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_share_batches(serve: Any) -> None:
    server = serve(max_batch_size=16, max_wait_ms=50)
    server.model.may_answer.clear()
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: found.update({n: server.post({"query": ["a" * (n + 1)]})[1]["rewards"]})
        )
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(server.model.batches) + server.health()["queued"] == 12)
    server.model.may_answer.set()
    for thread in threads:
        thread.join()
    assert found == {n: [n + 1.0] for n in range(12)}, "everybody gets his own answer"
    assert len(server.model.batches) <= 2, "those that came while the first batch was scored share the second"
    assert server.health()["mean_batch"] >= 6


def test_a_full_queue_says_come_back(serve: Any) -> None:
    server = serve(max_batch_size=1, max_queue=2)
    server.model.may_answer.clear()
    waiting = threading.Thread(target=lambda: server.post({"query": ["a", "b"]}))
    waiting.start()
    until(lambda: server.model.batches == [1])  # the other one is in the queue
    status, reply = server.post({"query": ["c", "d"]})
    assert status == 503 and "do not fit into a queue of 2; come back later" in reply["error"]
    assert server.health()["refused"] == 2
    server.model.may_answer.set()
    waiting.join()
    assert server.post({"query": ["c", "d"]})[0] == 200


def test_a_slow_model_does_not_hold_requests_for_ever(serve: Any) -> None:
    server = serve(timeout=0.2)
    server.model.may_answer.clear()
    status, reply = server.post({"query": ["abc"]})
    assert status == 503 and "No score within 0.2 seconds" in reply["error"]
    server.model.may_answer.set()


def test_a_failing_batch_does_not_end_the_server(serve: Any) -> None:
    server = serve()
    server.model.failing = True
    assert server.post({"query": ["abc"]}) == (500, {"error": "RuntimeError: out of memory"})
    server.model.failing = False
    assert server.post({"query": ["abc"]})[1]["rewards"] == [3.0]
    assert server.health()["failed"] == 1


def test_what_is_no_number_is_masked_by_the_client(serve: Any) -> None:
    server = serve()
    # "2+2?" and the end of the turn are 5 tokens; 13 tokens score NaN.
    answers = [trajectory("abc"), trajectory("a" * 8)]
    report = scorer(remote_url=server.url).score(answers)
    assert answers[0].score == 8.0 and answers[1].score is None and report.failed == 1
    assert report.metrics["reward/truncated/mean"] == 0.0


def test_the_client_sends_less_at_a_time_to_a_strict_server(serve: Any) -> None:
    server = serve(max_body_mb=0.001)
    texts = ["a" * n for n in range(1, 40) if n != 8] + ["b" * 3000]
    model = RewardServerClient(server.url, TOKENIZER, pause=0.01)
    values = model.score(build_samples([trajectory(text) for text in texts], TOKENIZER))
    assert [value["score"] for value in values[:-1]] == [len(text) + 5 for text in texts[:-1]]
    assert isinstance(values[-1], ConnectionError) and "the limit is" in str(values[-1])


def test_two_servers_of_which_one_dies(serve: Any) -> None:
    alive, dying = serve(), serve()
    model = RewardServerClient([dying.url, alive.url], TOKENIZER, pause=0.01)
    samples = build_samples([trajectory("a" * n) for n in (1, 2, 3, 4)], TOKENIZER)
    assert len(model.score(samples)) == 4 and dying.health()["items"] == 2
    dying.close()
    assert [value["score"] for value in model.score(samples)] == [6.0, 7.0, 8.0, 9.0] and model.retried > 0


def test_the_batcher_forgets_who_went_away() -> None:
    seen: list[list[int]] = []
    begun, may_end = threading.Event(), threading.Event()

    def answer(items: list[int]) -> list[int]:
        seen.append(items)
        begun.set()
        assert may_end.wait(60)
        return [item * 2 for item in items]

    async def scene() -> list[int]:
        batcher: DynamicBatcher[int, int] = DynamicBatcher(
            answer, max_batch_size=2, max_wait=0.0, max_queue=10
        )
        worker = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.submit([1, 2]))
        assert await asyncio.to_thread(begun.wait, 60)
        gone = asyncio.create_task(batcher.submit([3, 4]))
        await asyncio.sleep(0)  # it is in the queue
        gone.cancel()
        last = asyncio.create_task(batcher.submit([5]))
        await asyncio.sleep(0)
        may_end.set()
        found = await last + await first
        with pytest.raises(QueueFull):
            await batcher.submit(list(range(11)))
        worker.cancel()
        return found

    assert asyncio.run(scene()) == [10, 2, 4]
    assert seen == [[1, 2], [5]]


PIECES = [
    b"\\ud800",
    b"\xff",
    b"[",
    b"]",
    b"{",
    b"NaN",
    b"1e999",
    b"\x00",
    b'"',
    b",",
    b"null",
    b"9" * 5000,
    b"[" * 9999,
]


def test_mutated_bodies_are_read_or_refused() -> None:
    """500 bodies: texts that a tokenizer takes, or a message with a status of 4xx."""
    right = json.dumps({"query": ["ab", "c\U0001f600"], "prompts": ["a"], "labels": [None]}).encode()
    refused = 0
    for case in range(500):
        chance = random.Random(case)
        body = bytearray(right)
        for _ in range(chance.choice([1, 1, 2, 5])):
            place = chance.randrange(len(body))
            body[place : place + chance.choice([0, 1, 4])] = chance.choice(
                [*PIECES, bytes([chance.randrange(256)])]
            )
        try:
            texts = parse_queries(bytes(body), 100)
        except RequestRefused as refusal:
            refused += 1
            assert 400 <= refusal.status < 500, f"case {case}"
            str(refusal).encode("utf-8")
            continue
        TOKENIZER(texts)
        assert all(type(text) is str and text for text in texts), f"case {case}"
    assert refused > 300
