"""A judge behind a real HTTP server that stands in for a model, and one in an engine."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from strop.config.compose import load
from strop.config.schema.reward import JudgeConfig
from strop.rewards import reply_cache
from strop.rewards.base import build_samples
from strop.rewards.judge import ChatCompletionsClient, Judge, check_judge
from strop.rewards.reply_cache import ReplyCache
from tests.http_servers import PatientServer
from tests.rewards.scene import TOKENIZER, scorer, trajectory


class ChatDouble:
    """Speaks the chat protocol; `speak(prompt)` gives the text, or a status and a body."""

    def __init__(self, speak: Callable[[str], Any]):
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most = 0
        lock = threading.Lock()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "judge-7b"}]})

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    double.questions.append(question)
                    double.headers.append(dict(self.headers))
                    double.at_once += 1
                    double.most = max(double.most, double.at_once)
                said = speak(question["messages"][0]["content"])
                with lock:
                    double.at_once -= 1
                if isinstance(said, str):
                    self.answer(200, {"choices": [{"message": {"role": "assistant", "content": said}}]})
                else:
                    self.answer(*said)

            def answer(self, status: int, content: Any) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = PatientServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def serve():
    started: list[ChatDouble] = []

    def start(speak: Callable[[str], Any]) -> ChatDouble:
        started.append(ChatDouble(speak))
        return started[-1]

    yield start
    for double in started:
        double.http.shutdown()
        double.http.server_close()


def marks(judge: Judge, *texts: str) -> list[Any]:
    return judge.score(build_samples([trajectory(text, row=n) for n, text in enumerate(texts)], TOKENIZER))


def judge_at(double: ChatDouble, timeout: float = 100.0, **settings: Any) -> Judge:
    made = JudgeConfig(enable=True, url=double.url, **settings)
    return Judge(ChatCompletionsClient(made, timeout=timeout), made)


def grade(prompt: str) -> str:
    answer = prompt.partition("[Answer to grade]\n")[2].partition("\n\n[End")[0]
    return f"Some say Score: 1, but it is right.\n**Score: {10 if answer == '4' else 2.5}**"


def test_marks_become_scores_between_0_and_1(serve):
    double = serve(grade)
    assert marks(judge_at(double), "4", "5") == [
        {"score": 1.0, "judge_mark": 10.0},
        {"score": 0.25, "judge_mark": 2.5},
    ]
    asked = double.questions[0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("judge-7b", 0.0, 1024)
    prompt = asked["messages"][0]["content"]
    assert (
        "[Question]\n2+2?" in prompt
        and "[Reference answer]\n4" in prompt
        and "from 0 (wrong) to 10" in prompt
    )


def test_the_key_is_sent_and_is_nowhere_else(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-123")
    double = serve(grade)
    marks(judge_at(double, api_key_env="MY_KEY", model="m"), "4")
    assert double.headers[0]["Authorization"] == "Bearer sk-123" and "sk-123" not in json.dumps(
        double.questions
    )
    monkeypatch.delenv("MY_KEY")
    marks(judge_at(double, api_key_env="MY_KEY", model="m"), "4")
    assert "Authorization" not in double.headers[1]


@pytest.mark.parametrize(
    "said", ["Score: **8**", "**Score**: 8", "## Score:\n8/10", "<think>Score: 2?</think>Score: 8"]
)
def test_marks_in_markdown_and_after_thoughts(serve, said):
    assert marks(judge_at(serve(lambda _: said)), "4")[0]["judge_mark"] == 8.0


def test_a_mark_in_unfinished_thoughts_does_not_count(serve):
    [found] = marks(judge_at(serve(lambda _: "<think>Perhaps Score: 3? Or")), "4")
    assert isinstance(found, ValueError) and "judge.max_tokens=1024" in str(found)


def test_template_pattern_and_range_of_ones_own(serve, tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("Q={question} A={answer} T={ground_truth} S={data_source}")
    double = serve(lambda prompt: "<mark>-1</mark>" if "A=4" in prompt else "<mark>1</mark>")
    judge = judge_at(double, template=str(file), score_pattern=r"<mark>(.*?)</mark>", score_range=[-1.0, 1.0])
    assert [mark["score"] for mark in marks(judge, "4", "5")] == [0.0, 1.0]
    asked = sorted(question["messages"][0]["content"] for question in double.questions)
    assert asked[0] == "Q=2+2? A=4 T=4 S=openai/gsm8k"


def test_an_answer_cannot_fetch_the_truth(serve):
    double = serve(lambda prompt: "Score: 1")
    marks(judge_at(double, template="A={answer} T={ground_truth}"), "{ground_truth}{question}")
    assert double.questions[0]["messages"][0]["content"] == "A={ground_truth}{question} T=4"


def test_nothing_is_asked_twice(serve, tmp_path):
    double = serve(grade)
    path = tmp_path / "folder" / "judged.jsonl"
    judge = judge_at(double, cache_path=str(path))
    first = marks(judge, "4", "5", "4", "4")
    assert (
        len(double.questions) == 2
        and marks(judge, "4", "5", "4", "4") == first
        and len(double.questions) == 2
    )
    path.write_text(path.read_text() + '{"key": "cut o')  # a run that was killed
    later = judge_at(double, cache_path=str(path))
    assert marks(later, "5", "6")[0] == first[1] and len(double.questions) == 3
    other = judge_at(double, cache_path=str(path), model="another")
    marks(other, "5")
    assert len(double.questions) == 4  # another model is another judge


@pytest.mark.parametrize(
    ("speak", "kind", "says"),
    [
        (lambda _: "I would rather not.", ValueError, "gave no mark"),
        (lambda _: "", ValueError, "gave no mark"),
        (lambda _: "Score: 11", ValueError, r"gave 11, outside .*score_range=\[0, 10\]"),
        (lambda _: (200, {"choices": []}), ValueError, "answered without a text"),
        (
            lambda _: (200, {"choices": [{"message": {"content": None}}]}),
            ValueError,
            "answered without a text",
        ),
        (
            lambda _: (401, {"error": "key"}),
            ConnectionError,
            "The judge .* gave no usable answer after 1 try.*401.*key",
        ),
    ],
)
def test_failures_are_errors_never_marks(serve, speak, kind, says):
    [found] = marks(judge_at(serve(speak)), "4")
    assert isinstance(found, kind) and re.search(says, str(found)), found


def test_a_judge_that_hangs_is_an_error_after_the_timeout(serve):
    ends = threading.Event()
    judge = judge_at(serve(lambda _: (ends.wait(300), "Score: 1")[1]), timeout=0.5)
    start = time.monotonic()
    [found] = marks(judge, "4")
    assert isinstance(found, TimeoutError) and time.monotonic() - start < 100
    ends.set()


def test_failures_are_not_kept(serve):
    answers = iter(["no mark", "Score: 5"])
    judge = judge_at(serve(lambda _: next(answers)))
    assert isinstance(marks(judge, "4")[0], ValueError)
    assert marks(judge, "4")[0]["score"] == 0.5


def test_a_busy_server_is_asked_again(serve):
    answers = iter([(503, {}), (429, {}), "Score: 10"])
    settings = JudgeConfig(enable=True, url=serve(lambda _: next(answers)).url)
    row = trajectory("4")
    report = scorer(judge=settings, timeout=100.0).score([row])
    assert row.score == 1.0 and report.metrics["reward/retried"] == 2


def test_requests_run_side_by_side_up_to_the_limit(serve):
    four = threading.Barrier(4)
    double = serve(lambda prompt: (four.wait(60), "Score: 1")[1])  # breaks if fewer are asked at a time
    found = marks(judge_at(double, max_concurrent=4, score_range=[0, 2]), *map(str, range(12)))
    assert [mark["score"] for mark in found] == [0.5] * 12 and double.most == 4


def test_in_the_reward_loop_failures_are_masked(serve, tmp_path):
    double = serve(lambda prompt: "no" if "bad" in prompt else grade(prompt))
    rows = [trajectory("4", row=0), trajectory("bad", row=1), trajectory("5", row=2)]
    report = scorer(judge=JudgeConfig(enable=True, url=double.url)).score(rows)
    assert [row.score for row in rows] == [1.0, None, 0.25] and report.failed == 1
    assert rows[0].extras["judge_mark"] == 10.0 and report.metrics["reward/judge_mark/mean"] == 6.25
    code = "def compute_score(solution_str, extra_info): return extra_info['rm_score'] - 0.5 * (len(solution_str) > 3)"
    mixed = [trajectory("4", row=0), trajectory("long", row=1)]
    scorer(tmp_path, code, judge=JudgeConfig(enable=True, url=double.url)).score(mixed)
    assert [row.score for row in mixed] == [1.0, -0.25]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "localhost:8000"}, "is not an http"),
        ({"url": "http://127.0.0.1:9/v1"}, "Is it running.*judge.model"),
        ({"template": "gone.txt"}, "neither a file nor a text"),
        ({"template": "Judge this: {question}"}, r"does not contain \{answer\}"),
        ({"score_pattern": "("}, "no regular expression"),
        ({"score_pattern": "score"}, "needs one group"),
        ({"score_range": [1.0, 1.0]}, r"must be \[low, high\]"),
    ],
)
def test_bad_settings_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        check_judge(JudgeConfig(enable=True, **settings), timeout=60.0)


def test_a_judge_needs_a_model_and_no_rival():
    keys = ["actor_rollout_ref.model.path=x", "data.train_files=y.parquet", "reward_model.judge.enable=true"]
    from strop.config.rules import check

    def errors(*more: str) -> str:
        return " ".join(str(finding) for finding in check(load("ppo_trainer", [*keys, *more])))

    assert "needs reward_model.judge.url or reward_model.model.path" in errors()
    assert "not both" in errors("reward_model.enable=true", "reward_model.model.path=z")


def test_cache_is_shared_between_threads(tmp_path):
    cache = ReplyCache(str(tmp_path / "c.jsonl"))
    threads = [threading.Thread(target=cache.add, args=({f"k{n}": "x" * 100},)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = ReplyCache(str(tmp_path / "c.jsonl"))
    assert again.find(f"k{n}" for n in range(25)) == {f"k{n}": "x" * 100 for n in range(20)}


def test_a_cache_in_memory_keeps_the_replies_used_last(monkeypatch):
    monkeypatch.setattr(reply_cache, "MAX_CHARACTERS", 1000)
    cache = ReplyCache(None)
    for number in range(50):
        cache.add({f"k{number}": "x" * 100})
        assert cache.find(["k0"]), "it is used in every step"
    assert sorted(cache.find(f"k{n}" for n in range(50))) == sorted(["k0", *(f"k{n}" for n in range(41, 50))])
    cache.add({"k0": "y" * 100})
    assert cache.find(["k0", "k41"]) == {"k0": "y" * 100, "k41": "x" * 100}


def test_a_cache_file_that_fails_costs_no_reply(serve, tmp_path, caplog):
    """A full disk: the judge has answered, and the run must go on. Later replies reach the file again."""
    path = tmp_path / "judged.jsonl"
    double = serve(grade)
    judge = judge_at(double, cache_path=str(path))
    first = marks(judge, "4")
    with path.open("ab") as file:
        file.write(b'{"key": "cut o')  # another run was killed
    path.rename(tmp_path / "away")
    path.mkdir()
    assert marks(judge, "4", "5")[0] == first[0]
    assert marks(judge, "4", "5")[0] == first[0] and len(double.questions) == 3, "asked again once"
    assert caplog.text.count("Replies stay in memory while it fails") == 1
    path.rmdir()
    (tmp_path / "away").rename(path)
    marks(judge, "6")
    later = judge_at(double, cache_path=str(path))
    marks(later, "4", "6")
    assert len(double.questions) == 4
