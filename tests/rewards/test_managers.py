"""Managers end to end: scores, extras, penalties, counters; every way to fail masks its sample and says so."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.catalog import REWARD_MANAGERS, SCORERS
from strop.concurrency import BlockedCalls
from strop.config.compose import load
from strop.config.rules import check
from strop.config.schema.reward import OverlongBufferConfig, RewardManagerConfig, RewardManagerModuleConfig
from strop.rewards.base import build_samples
from strop.rewards.managers import PrimeRewardManager, RateLimit
from strop.rewards.scorer import Scorer, Shaping
from tests.rewards import hostile
from tests.rewards.limits import limit_responses
from tests.rewards.scene import TOKENIZER, scorer, trajectory

LENGTHS = "def compute_score(solution_str): return len(solution_str)\n"
MOODS = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise": raise KeyError("missing thing")
    if solution_str == "nan": return float("nan")
    if solution_str == "text": return "1.0"
    if solution_str == "keyless": return {"acc": 1}
    if solution_str == "none": return None
    if solution_str == "sleep": time.sleep(300)
    if solution_str == "long dict": return {"score": 0.5, "acc": True, "pred": "x", "nothing": float("nan")}
    return {"score": 1, "length": len(solution_str)}
"""


MANAGERS = REWARD_MANAGERS.names()
ONE_BY_ONE = [name for name in MANAGERS if not REWARD_MANAGERS.entry(name).facts["takes_lists"]]
"""Managers that call the function with one sample."""


def test_the_managers_of_verl_are_registered() -> None:
    assert {"batch", "dapo", "naive", "prime", "rate_limited", "remote"} <= set(MANAGERS)


@pytest.mark.parametrize("name", MANAGERS)
def test_every_manager_has_one_result_per_sample_in_order(name: str) -> None:
    made = scorer(reward_manager=name)
    assert made.manager is not None
    samples = build_samples([trajectory(f"#### {i % 3}", truth="2") for i in range(9)], TOKENIZER)
    assert list(made.manager.score(samples)) == [0.0, 0.0, 1.0] * 3
    assert list(made.manager.score([])) == []
    made.close()


@pytest.mark.parametrize("name", MANAGERS)
def test_under_every_manager_a_source_without_a_rule_fails_its_sample_only(name: str) -> None:
    made = scorer(reward_manager=name)
    answers = [trajectory(), trajectory(source="who/knows"), trajectory("#### 5")]
    report = made.score(answers)
    made.close()
    assert [t.score for t in answers] == [1.0, None, 0.0] and report.failed == 1


@pytest.mark.parametrize("name", MANAGERS)
def test_rules_score_under_every_manager(name: str) -> None:
    made = scorer(reward_manager=name)
    answers = [trajectory(), trajectory("#### 5"), trajectory("Answer: 4", source="math_dapo")]
    report = made.score(answers)
    made.close()
    assert [t.score for t in answers] == [1.0, 0.0, 1.0]
    assert answers[2].extras == {"score": 1.0, "acc": True, "pred": "4"}
    stores_acc = REWARD_MANAGERS.entry(name).facts["stores_acc"]
    assert answers[0].extras == ({"acc": 1.0} if stores_acc else {})
    assert report.samples == 3 and report.failed == report.timed_out == report.retried == 0
    assert report.metrics["reward/score/mean"] == pytest.approx(2 / 3) and report.metrics[
        "reward/acc/mean"
    ] == pytest.approx(2 / 3 if stores_acc else 1.0)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_failure_masks_its_sample_and_no_other(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_responses(monkeypatch, "sleep")
    # Without the warning that many calls of other tests hang.
    monkeypatch.setattr("strop.concurrency.blocked_calls", BlockedCalls())
    made = scorer(tmp_path, MOODS, reward_manager=name, timeout=1.0, num_workers=2, max_concurrent=4)
    moods = ["good", "raise", "nan", "text", "keyless", "none", "sleep", "long dict"]
    answers = [trajectory(mood, row=10 + i, source="my/source") for i, mood in enumerate(moods)]
    with caplog.at_level(logging.WARNING, logger="strop.rewards"):
        report = made.score(answers)
    made.close()
    assert [t.score for t in answers] == [1.0, None, None, None, None, None, None, 0.5]
    assert (report.failed, report.timed_out, report.retried) == (6, 1, 0)
    assert report.metrics["reward/failed"] == 6 and report.metrics["reward/timed_out"] == 1
    assert report.metrics["reward/score/mean"] == 0.75
    assert (
        report.metrics["reward/length/mean"] == 4 and report.metrics["reward/acc/mean"] == 1.0
    )  # keys differ by sample
    assert "reward/nothing/mean" not in report.metrics and "reward/pred/mean" not in report.metrics
    [line] = [record.getMessage() for record in caplog.records]
    assert "6 of 8 samples" in line and "row 11 of my/source" in line and "KeyError: 'missing thing'" in line
    if not isinstance(made.manager, PrimeRewardManager):  # a traceback does not cross processes
        assert "my_reward.py, line 4" in line


def test_when_all_fail_the_scorer_is_broken(tmp_path: Path) -> None:
    made = scorer(tmp_path, MOODS)
    answers = [trajectory("raise", row=3), trajectory("nan", row=4)]
    with pytest.raises(
        ValueError,
        match=r"all 2 samples.*row 3 of openai/gsm8k: KeyError: 'missing thing' \(my_reward.py, line 4",
    ):
        made.score(answers)
    assert [t.score for t in answers] == [None, None]
    with pytest.raises(ValueError, match="No rule scorer knows the data source 'who/knows'"):
        scorer().score([trajectory(source="who/knows")])
    assert made.score([]).samples == 0


FLAKY = """
calls = {}
def compute_score(solution_str, extra_info):
    n = calls[solution_str] = calls.get(solution_str, 0) + 1
    if n < int(solution_str): raise OSError("not yet")
    return n
"""


def test_retries_ask_again_only_those_that_failed(tmp_path: Path) -> None:
    answers = [trajectory(text) for text in ("1", "2", "3", "9")]
    report = scorer(tmp_path, FLAKY, retries=2).score(answers)
    assert [t.score for t in answers] == [1.0, 2.0, 3.0, None]
    assert report.retried == 3 + 2 and report.failed == 1


ASYNC = """
import asyncio, os
loops, most, running = set(), 0, 0
async def compute_score(solution_str, delay=0.05, together=1, after=None):
    global most, running
    loops.add(id(asyncio.get_running_loop()))
    running += 1
    most = max(most, running)
    for _ in range(1000):  # on a busy machine the last call starts late
        if most >= together:
            break
        await asyncio.sleep(0.01)
    while solution_str == "abc" and after and not os.path.exists(after):
        await asyncio.sleep(0.01)
    await asyncio.sleep(300 if solution_str == "slow" else delay)
    running -= 1
    return {"score": len(solution_str), "most": most, "loops": len(loops)}
"""


@pytest.mark.parametrize(("name", "most"), [("naive", 20), ("rate_limited", 3)])
def test_async_functions_wait_together_on_one_loop(name: str, most: int, tmp_path: Path) -> None:
    made = scorer(tmp_path, ASYNC, kwargs={"together": most}, reward_manager=name, max_concurrent=3)
    answers = [trajectory("a" * i) for i in range(20)]
    made.score(answers)
    assert [t.score for t in answers] == list(range(20))
    assert max(t.extras["most"] for t in answers) == most
    again = trajectory("abc")
    made.score([again])
    assert again.extras["loops"] == 1


def test_scoring_inside_a_running_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_responses(monkeypatch, "slow")
    ticked = tmp_path / "ticked"
    made = scorer(tmp_path, ASYNC, kwargs={"delay": 0.2, "after": str(ticked)}, timeout=1.0)

    async def tick() -> None:
        for _ in range(10):
            await asyncio.sleep(0.01)
        ticked.touch()

    async def inside() -> None:
        direct = trajectory("ab")
        made.score([direct])
        assert direct.score == 2
        awaited, slow = trajectory("abc"), trajectory("slow")
        ticking = asyncio.create_task(tick())  # the caller's loop goes on: a score waits for it
        report = await asyncio.to_thread(made.score, [awaited, slow])
        await ticking
        assert awaited.score == 3 and slow.score is None and report.timed_out == 1

    asyncio.run(inside())


def test_async_is_refused_where_processes_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Use naive"):
        scorer(tmp_path, ASYNC, reward_manager="prime")


@pytest.mark.parametrize("arguments", ["ground_truth, extra_info", "completion, ground_truth, **extra_info"])
def test_what_a_function_changes_is_its_own(tmp_path: Path, arguments: str) -> None:
    code = f"def compute_score({arguments}): return ground_truth.pop() + extra_info['more']['of'].pop()\n"
    answers = [trajectory(truth=[1, 2]), trajectory(truth=[1, 2])]
    answers[0].prompt.extra_info["more"] = {"of": [10, 20]}
    answers[1].prompt = answers[0].prompt  # two samples of one row
    scorer(tmp_path, code).score(answers)
    assert [answer.score for answer in answers] == [22.0, 22.0]


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_arguments_may_have_any_name(tmp_path: Path, manager: str) -> None:
    code = "def compute_score(completion, timeout, function, self=0): return timeout + function\n"
    made, answer = scorer(tmp_path, code, reward_manager=manager, kwargs={"function": 4}), trajectory()
    answer.prompt.extra_info["timeout"] = 3  # a column of the row
    made.score([answer])
    made.close()
    assert answer.score == 7.0


def test_processes_survive_what_threads_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_responses(monkeypatch, "hang")
    code = """
import os, re
def compute_score(solution_str, ground_truth):
    if solution_str == "die": os._exit(3)
    if solution_str == "hang": re.fullmatch(r"(a+)+b", "a" * 60)
    return float(solution_str == ground_truth)
"""
    made = scorer(tmp_path, code, reward_manager="prime", num_workers=2, timeout=1.0)
    answers = [trajectory(text) for text in ("4", "die", "hang", "5", "4")]
    report = made.score(answers)
    assert [t.score for t in answers] == [1.0, None, None, 0.0, 1.0]
    assert report.failed == 2 and report.timed_out == 1
    made.close()


def test_signals_need_processes_and_the_error_says_so(tmp_path: Path) -> None:
    code = """
import signal
def compute_score(solution_str):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return 1.0
"""
    with pytest.raises(ValueError, match=r"reward_model.reward_manager=prime: it runs scorers in processes"):
        scorer(tmp_path, code).score([trajectory()])
    made, answer = scorer(tmp_path, code, reward_manager="prime"), trajectory()
    made.score([answer])
    made.close()
    assert answer.score == 1.0


BATCH = """
calls = []
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    calls.append(len(solution_strs))
    assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
    if "wrong" in solution_strs: return [1.0]
    if "raise" in solution_strs: raise RuntimeError("whole batch")
    return [{"score": len(s) + bonus, "calls": len(calls)} if s != "bad" else float("inf") for s in solution_strs]
"""


def test_batch_is_one_call(tmp_path: Path) -> None:
    made = scorer(tmp_path, BATCH, reward_manager="batch", kwargs={"bonus": 0.5})
    answers = [trajectory("a"), trajectory("bad"), trajectory("abc")]
    report = made.score(answers)
    assert [t.score for t in answers] == [1.5, None, 3.5] and report.failed == 1
    assert answers[2].extras == {"score": 3.5, "calls": 1, "acc": 3.5}
    with pytest.raises(ValueError, match="called with 2 samples and returned 1 values"):
        made.score([trajectory("wrong"), trajectory()])
    with pytest.raises(ValueError, match="RuntimeError: whole batch"):
        made.score([trajectory("raise")])


def test_a_batch_function_may_return_a_tensor_or_be_async(tmp_path: Path) -> None:
    code = "import torch\nasync def compute_score(solution_strs): return torch.tensor([len(s) for s in solution_strs])\n"
    answers = [trajectory("a"), trajectory("abc")]
    scorer(tmp_path, code, reward_manager="batch").score(answers)
    assert [t.score for t in answers] == [1.0, 3.0]


def test_naive_calls_in_order(tmp_path: Path) -> None:
    code = (
        "seen = []\ndef compute_score(solution_str):\n    seen.append(solution_str)\n    return len(seen)\n"
    )
    answers = [trajectory(str(i)) for i in range(50)]
    scorer(tmp_path, code).score(answers)
    assert [t.score for t in answers] == list(range(1, 51))


def test_scored_by_its_environment_stays_so(tmp_path: Path) -> None:
    done, fresh = trajectory("abc", score=7.0), trajectory("abc")
    report = scorer(tmp_path, LENGTHS).score([done, fresh])
    assert (done.score, fresh.score, report.samples) == (7.0, 3.0, 1)


def test_overlong_penalty_and_its_report(tmp_path: Path) -> None:
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0, log=True)
    code = "def compute_score(solution_str): return 1.0\n"
    made = scorer(
        tmp_path, code, reward_manager="dapo", overlong_buffer=buffer, reward_kwargs={"max_resp_len": 10}
    )
    answers = [trajectory("a" * (tokens - 1)) for tokens in (6, 7, 10)]  # and the end-of-turn token
    report = made.score(answers)
    assert [t.score for t in answers] == [1.0, 0.5, -1.0]
    assert [t.extras for t in answers] == [
        {"acc": 1.0, "overlong_reward": reward, "overlong": over}
        for reward, over in ((0, False), (-0.5, True), (-2.0, True))
    ]
    assert report.metrics["reward/score/mean"] == 1.0 and report.metrics[
        "reward/overlong/mean"
    ] == pytest.approx(2 / 3)


def test_the_overlong_penalty_needs_to_know_the_limit() -> None:
    with pytest.raises(ValueError, match=r"max_resp_len, or data.max_response_length"):
        scorer(overlong_buffer=OverlongBufferConfig(enable=True, len=4))
    with pytest.raises(ValueError, match="len=20 must lie between 1 and the longest response, 10"):
        scorer(overlong_buffer=OverlongBufferConfig(enable=True, len=20), max_response_length=10)


@pytest.mark.parametrize(("coef", "expected"), [(0.25, 1.0), (0.0, 0.0), (-3.0, -3.0)])
def test_responses_that_did_not_stop(coef: float, expected: float, tmp_path: Path) -> None:
    stopped, cut = trajectory("abcd"), trajectory("abcd", finish="length")
    scorer(tmp_path, LENGTHS, stop_properly_penalty_coef=coef).score([stopped, cut])
    assert (stopped.score, cut.score) == (4.0, expected)


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.floats(-50, 50), min_size=1, max_size=6),
    low=st.floats(-5, 0),
    width=st.floats(0.1, 5),
    coef=st.none() | st.floats(-4, 1),
)
def test_shaped_scores_stay_in_range(
    scores: list[float], low: float, width: float, coef: float | None
) -> None:
    answers = [trajectory(finish="length" if i % 2 else "stop") for i in range(len(scores))]
    shaped, reports = Shaping(clip=(low, low + width), truncated=coef).apply(scores, answers)
    assert reports == [{}] * len(scores)
    for i, (before, after) in enumerate(zip(scores, shaped)):
        factor = 1.0 if coef is None or i % 2 == 0 else coef
        meant = before * factor if factor >= 0 else factor
        assert after == pytest.approx(min(max(meant, low), low + width))


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low < high, it is \[2, 1\]"):
        scorer(clip_range=[2, 1])
    with pytest.raises(ValueError, match=r"clip_range must be \[low, high\]"):
        scorer(clip_range=[2])
    with pytest.raises(ValueError, match=r"reward_kwargs has \['buffer'\]"):
        scorer(reward_kwargs={"buffer": 3})


def test_the_whole_transcript_on_request(tmp_path: Path) -> None:
    code = "def compute_score(solution_str): return 'tool' in solution_str\n"
    mixed: dict[str, Any] = {"text": "a tool b", "mask": [1, 1, 0, 0, 0, 0, 1, 1, 1]}
    sampled, whole = trajectory(**mixed), trajectory(**mixed)
    scorer(tmp_path, code).score([sampled])
    scorer(tmp_path, code, reward_kwargs={"whole_transcript": True}).score([whole])
    assert (sampled.score, whole.score) == (0.0, 1.0)


def test_a_budget_holds_in_any_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where the budget sleeps."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("strop.rewards.managers.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    budget, moments = RateLimit(3, window=0.2), []
    for _ in range(8):
        budget.acquire(1)
        moments.append(now)
    assert moments == pytest.approx([0.0] * 3 + [0.2] * 3 + [0.4] * 2)
    tokens = RateLimit(10, window=0.2)
    start = now
    for _ in range(3):
        tokens.acquire(6)
    assert now - start == pytest.approx(0.4)


def test_rate_limits_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_tpm=100 is below .*estimated_tokens_per_request=2000"):
        scorer(reward_manager="rate_limited", max_tpm=100)
    made = scorer(
        tmp_path, LENGTHS, reward_manager="rate_limited", max_rpm=3, max_tpm=20000, max_concurrent=8
    )
    limits = [(amount, budget.limit, budget.window) for amount, budget in made.manager.limits]  # type: ignore[union-attr]
    assert limits == [(1, 3, 60.0), (2000, 20000, 60.0)]
    made.manager.limits[0][1].window = 0.2  # type: ignore[union-attr]
    start = time.monotonic()
    report = made.score([trajectory() for _ in range(9)])
    assert report.failed == 0 and time.monotonic() - start >= 0.39
    slow = scorer(reward_manager="rate_limited", max_rpm=0.5).manager.limits[0][1]  # type: ignore[union-attr]
    assert (slow.limit, slow.window) == (1.0, 120.0)


OWN = """
class Halving:
    def __init__(self, function, settings, divisor=2.0):
        self.function, self.divisor = function, divisor
    def score(self, samples):
        return [self.function(s) / self.divisor if s.solution_str != "no" else RuntimeError("refused") for s in samples]
class Short:
    def __init__(self, function, settings): pass
    def score(self, samples): return [1.0]
class OfVerl:
    def __init__(self, config, tokenizer, compute_score): pass
    async def run_single(self, data): return {"reward_score": 1.0}
"""


def own(path: Path, name: str) -> RewardManagerConfig:
    return RewardManagerConfig(
        source="importlib", module=RewardManagerModuleConfig(path=str(path), name=name)
    )


def test_a_manager_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "own_manager.py"
    file.write_text(OWN)
    answers = [trajectory(), trajectory("no"), trajectory("#### 5")]
    report = scorer(manager=own(file, "Halving"), reward_kwargs={"divisor": 4.0}).score(answers)
    assert [t.score for t in answers] == [0.25, None, 0.0] and report.failed == 1
    with pytest.raises(ValueError, match="Short was given 2 samples and returned 1 values"):
        scorer(manager=own(file, "Short")).score([trajectory(), trajectory()])
    with pytest.raises(ValueError, match=r"'OfVerl' of .* has no method `score\(samples\)`"):
        scorer(manager=own(file, "OfVerl"))
    with pytest.raises(ValueError, match=r"needs reward_manager\.module\.path"):
        scorer(manager=RewardManagerConfig(source="importlib"))


def test_verl_names_the_class_of_a_manager_in_reward_manager_name(tmp_path: Path) -> None:
    file = tmp_path / "own_manager.py"
    file.write_text(OWN)
    words = ["reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={file}"]
    loaded = load("ppo_trainer", [*words, "reward.reward_manager.name=Halving"])
    assert "reward_manager.name" not in {finding.key for finding in check(loaded)}
    answer = trajectory()
    scorer(manager=loaded.config.reward_manager).score([answer])
    assert answer.score == 0.5
    typo = check(load("ppo_trainer", ["reward.reward_manager.name=dappo"]))
    assert "'dapo'" in next(str(finding) for finding in typo if finding.key == "reward_manager.name")


def test_a_registered_manager_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REWARD_MANAGERS, "_entries", dict(REWARD_MANAGERS._entries))

    @REWARD_MANAGERS.register("constant", stores_acc=True)
    class Constant:
        def __init__(self, function: Any, settings: Any):
            pass

        def score(self, samples: Any) -> list[float]:
            return [3.0 for _ in samples]

    answer = trajectory()
    scorer(manager=RewardManagerConfig(name="constant")).score([answer])
    assert answer.score == 3.0 and answer.extras == {"acc": 3.0}
    with pytest.raises(ValueError, match=r"Unknown reward manager 'naiv'.*'naive'"):
        scorer(manager=RewardManagerConfig(name="naiv"))


def test_a_model_first_then_the_function(tmp_path: Path) -> None:
    class Model:
        def score(self, samples: Any) -> list[Any]:
            return [0.5, RuntimeError("no score")]

    code = "def compute_score(extra_info): return {'score': 10 + extra_info['rm_score']}\n"
    function = scorer(tmp_path, code).manager
    answers = [trajectory(), trajectory()]
    report = Scorer(TOKENIZER, model=Model(), manager=function).score(answers)
    assert [t.score for t in answers] == [10.5, None] and report.failed == 1
    assert answers[0].extras == {"rm_score": 0.5, "score": 10.5}


def test_slow_rules_run_under_their_limit_beside_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORERS, "_entries", dict(SCORERS._entries))
    SCORERS.declare("hanging", hostile.catastrophic_score, source="test", sources=("hang/*",), slow=True)
    answers = [trajectory("a" * 60, source="hang/x"), trajectory(), trajectory("aab", source="hang/y")]
    limit_responses(monkeypatch, "a" * 60)
    report = scorer(timeout=1.0).score(answers)
    assert [t.score for t in answers] == [None, 1.0, 1.0] and report.timed_out == 1


def test_keys_as_people_write_them_reach_the_scorer(tmp_path: Path) -> None:
    from strop.config.compose import load
    from strop.rewards.managers import build_scorer

    file = tmp_path / "composed_reward.py"
    file.write_text("def mine(solution_str, bonus): return {'score': bonus, 'length': len(solution_str)}\n")
    config = load(
        "ppo_trainer",
        [
            f"custom_reward_function.path={file}",
            "custom_reward_function.name=mine",
            "+custom_reward_function.reward_kwargs.bonus=20",
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=8",
            "+reward_model.reward_kwargs.max_resp_len=10",
            "reward_model.clip_range=[-5,15]",
        ],
    ).config
    made = build_scorer(config.reward_model, config.custom_reward_function, config.reward_manager, TOKENIZER)
    short, long = trajectory("abc"), trajectory("a" * 9)
    made.score([short, long])
    assert (short.score, long.score) == (15.0, 12.0)
    assert short.extras == {"score": 20.0, "length": 3, "acc": 20.0}
