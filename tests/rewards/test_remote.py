"""A real server on this machine: the protocol, several addresses, and every way a server can fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.rewards import remote
from strop.rewards.base import build_samples
from strop.rewards.remote import RewardServerClient, parse_reply
from tests.http_servers import PatientServer
from tests.rewards.scene import TOKENIZER, scorer, trajectory

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """Answers with `answer(question)`: a status, and something to send as JSON (bytes are sent as they are)."""

    def __init__(self, answer: Answer, *, listens: bool = True):
        """A server that does not listen refuses connections, and keeps its port."""
        self.questions: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.questions.append(question)
                status, reply = answer(question)
                body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = PatientServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.http.daemon_threads = True
        self.http.server_bind()
        self.url = f"http://127.0.0.1:{self.http.server_port}/get_reward"
        self._serving: threading.Thread | None = None
        if listens:
            self.listen()

    def listen(self) -> None:
        self.http.server_activate()
        serve = self.http.serve_forever
        self._serving = threading.Thread(target=serve, kwargs={"poll_interval": 0.02}, daemon=True)
        self._serving.start()

    def close(self) -> None:
        if self._serving is not None:
            self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    started: list[Server] = []

    def start(answer: Answer, *, listens: bool = True) -> Server:
        started.append(Server(answer, listens=listens))
        return started[-1]

    yield start
    for server in started:
        server.close()


def lengths(question: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"rewards": [float(len(text)) for text in question["query"]]}


def asked(model: RewardServerClient, texts: list[str]) -> list[Any]:
    return model.score(build_samples([trajectory(text) for text in texts], TOKENIZER))


def test_the_protocol(serve: Any) -> None:
    server = serve(lengths)
    answers = [trajectory("abc"), trajectory("", truth={"target": [1]})]
    report = scorer(remote_url=server.url).score(answers)
    assert server.questions == [
        {
            "query": ["2+2?abc<|im_end|>", "2+2?<|im_end|>"],
            "prompts": ["2+2?", "2+2?"],
            "labels": ["4", {"target": [1]}],
        }
    ]
    assert [t.score for t in answers] == [17.0, 14.0] and report.metrics["reward/score/mean"] == 15.5


def test_scores_and_logs_come_along(serve: Any) -> None:
    def rich(question: dict[str, Any]) -> tuple[int, Any]:
        n = len(question["query"])
        return 200, {
            "rewards": [0.5] * n,
            "scores": [1] * n,
            "extra_logs": {"place": list(range(n)), "shared": 3, "odd": [1, 2, 3]},
        }

    answers = [trajectory(), trajectory()]
    report = scorer(remote_url=serve(rich).url).score(answers)
    assert answers[1].score == 0.5 and answers[1].extras == {
        "score": 0.5,
        "scores": 1,
        "place": 1,
        "shared": 3,
    }
    assert report.metrics["reward/scores/mean"] == 1.0 and report.metrics["reward/place/mean"] == 0.5


@pytest.mark.parametrize(
    "returned", ["{'rewards': found, 'scores': found, 'extra_logs': {'mean': found.mean()}}", "found"]
)
def test_a_reward_function_of_openrlhf(returned: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    found = torch.tensor([float(q == p + '4<|im_end|>') for q, p in zip(queries, prompts)])\n"
        "    assert labels == ['4', '4']\n"
        f"    return {returned}\n"
    )
    answers = [trajectory("4"), trajectory("5")]
    report = scorer(remote_url=str(tmp_path / "reward.py")).score(answers)
    assert [t.score for t in answers] == [1.0, 0.0] and report.metrics["reward/score/mean"] == 0.5
    assert answers[0].extras.get("mean") == (0.5 if "extra_logs" in returned else None)


def test_samples_are_divided_over_the_servers(serve: Any) -> None:
    one, two = serve(lengths), serve(lengths)
    assert asked(RewardServerClient([one.url, two.url], TOKENIZER), ["a", "ab", "abc"]) == [15.0, 16.0, 17.0]
    assert sorted(len(s.questions[0]["query"]) for s in (one, two)) == [1, 2]
    workers = serve(lengths)
    asked(RewardServerClient(workers.url, TOKENIZER, workers=4), ["a"] * 8)
    assert [len(q["query"]) for q in workers.questions] == [2, 2, 2, 2]


def test_a_server_that_is_down_is_passed_over(serve: Any) -> None:
    gone = serve(lengths, listens=False)
    model = RewardServerClient([gone.url, serve(lengths).url], TOKENIZER, pause=0.01)
    assert asked(model, ["a", "ab"]) == [15.0, 16.0] and model.retried >= 1


def test_trouble_that_passes_is_retried_and_counted(serve: Any) -> None:
    replies = iter([(503, {}), (200, b"not json"), (200, {"rewards": [2.0]})])
    made = scorer(remote_url=serve(lambda _: next(replies)).url)
    made.model.pause = 0.01  # type: ignore[union-attr]
    answer = trajectory()
    report = made.score([answer])
    assert answer.score == 2.0 and report.retried == 2 and report.metrics["reward/retried"] == 2


def test_refusals_are_not_retried(serve: Any) -> None:
    server = serve(lambda _: (422, {"detail": "labels are missing"}))
    [error] = asked(RewardServerClient(server.url, TOKENIZER), ["a"])
    assert (
        isinstance(error, ConnectionError)
        and "after 1 try" in str(error)
        and "labels are missing" in str(error)
    )
    assert len(server.questions) == 1


@pytest.mark.parametrize("reply", [(500, {}), (200, b"not json")])
def test_a_fault_of_the_server_is_tried_a_few_times(serve: Any, reply: tuple[int, Any]) -> None:
    server = serve(lambda _: reply)
    [error] = asked(RewardServerClient(server.url, TOKENIZER, max_faults=3, pause=0.01), ["a"])
    assert "after 3 tries" in str(error) and len(server.questions) == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_tried_until_the_timeout(serve: Any, status: int) -> None:
    replies = iter([(status, {})] * 12 + [(200, {"rewards": [2.0]})])
    model = RewardServerClient(serve(lambda _: next(replies)).url, TOKENIZER, pause=0.0001, timeout=100)
    assert asked(model, ["a"]) == [2.0] and model.retried == 12


def test_a_server_that_restarts_is_waited_for(serve: Any, caplog: Any) -> None:
    server = serve(lengths, listens=False)
    # More tries than a fault is given, within the timeout.
    model = RewardServerClient(server.url, TOKENIZER, timeout=100, max_faults=2, pause=0.02)

    def restart() -> None:
        while model.retried <= 2:
            time.sleep(0.01)
        server.listen()

    restarting = threading.Thread(target=restart, daemon=True)
    restarting.start()
    assert asked(model, ["a", "ab"]) == [15.0, 16.0] and model.retried > 2
    restarting.join()
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 2, notices
    assert f"{server.url} does not answer" in notices[0] and "is tried again for" in notices[0]
    assert f"{server.url} answers again, after" in notices[1]


def test_a_server_that_stays_away_ends_at_the_timeout(serve: Any, monkeypatch: Any) -> None:
    """Time passes during the pauses only."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    for module in ("strop.rewards.remote", "strop.rewards.http", "strop.http_replies"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(remote, "GRACE", 100.0)
    gone = serve(lengths, listens=False)
    model = RewardServerClient(gone.url, TOKENIZER, timeout=0.5, pause=0.02)
    [error] = asked(model, ["a"])
    assert isinstance(error, ConnectionError) and gone.url in str(error)
    assert 0.4 < now <= 0.5


def test_a_hanging_server_costs_its_own_samples(serve: Any, monkeypatch: Any) -> None:
    ends = threading.Event()
    request = RewardServerClient._request

    def patient_with_the_quick(model: Any, samples: Any, deadline: float | None = None) -> Any:
        """On a busy machine, a server that does not hang may take longer than the timeout."""
        if deadline is None and samples[0].solution_str == "quick":
            deadline = time.monotonic() + 100
        return request(model, samples, deadline)

    def slow(question: dict[str, Any]) -> tuple[int, Any]:
        if any("slow" in text for text in question["query"]):
            ends.wait(300)
        return lengths(question)

    monkeypatch.setattr(remote, "GRACE", 200.0)
    monkeypatch.setattr(RewardServerClient, "_request", patient_with_the_quick)
    answers = [trajectory("slow"), trajectory("quick")]
    start = time.monotonic()
    report = scorer(remote_url=serve(slow).url, num_workers=2, timeout=0.5).score(answers)
    assert time.monotonic() - start < 150, "the server that hangs is not waited for"
    ends.set()
    assert [t.score for t in answers] == [None, 19.0] and (report.failed, report.timed_out) == (1, 1)


def test_rewards_that_are_none_mask_their_sample(serve: Any) -> None:
    answers = [trajectory(), trajectory()]
    report = scorer(remote_url=serve(lambda _: (200, {"rewards": [None, 1]})).url).score(answers)
    assert [t.score for t in answers] == [None, 1.0] and report.failed == 1


def test_unusable_replies_say_what_came() -> None:
    with pytest.raises(ValueError, match=r"answered without 'rewards' \(it sent: reward\)"):
        parse_reply({"reward": 1}, 1, "http://x")
    with pytest.raises(ValueError, match="sent 3 samples and answered with 2 rewards"):
        parse_reply({"rewards": [1, 2]}, 3, "http://x")
    with pytest.raises(ValueError, match="was sent 3 samples and answered with 1 rewards"):
        parse_reply({"rewards": 0.5}, 3, "http://x")
    assert parse_reply({"rewards": 1.5, "scores": 1.5}, 1, "http://x") == [1.5]
    with pytest.raises(ValueError, match="not an http:// or https:// address"):
        RewardServerClient("reward.py", TOKENIZER)


def test_when_the_server_is_broken_the_step_stops(serve: Any) -> None:
    with pytest.raises(ValueError, match=r"all 2 samples.*answered without 'rewards'"):
        scorer(remote_url=serve(lambda _: (200, {"r": []})).url).score([trajectory(), trajectory()])
