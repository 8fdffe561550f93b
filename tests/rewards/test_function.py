"""A user's function: loaded, checked against what it will be given, and its results understood."""

from __future__ import annotations

import io
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.rewards.base import build_samples, parse_verdict
from strop.rewards.function import RewardFunction, load_function
from strop.rewards.standard_streams import reopen_streams
from tests.rewards.scene import TOKENIZER, ids, trajectory


def sample(**more: Any) -> Any:
    return build_samples([trajectory(**more)], TOKENIZER)[0]


def test_arguments_by_name_only_those_taken() -> None:
    everything = RewardFunction(lambda **given: given, {"k": 3})(sample(row=5, extra_info={"level": 2}))
    assert everything == {
        "data_source": "openai/gsm8k",
        "solution_str": "#### 4",
        "ground_truth": "4",
        "extra_info": {"level": 2, "num_turns": 2, "turn_scores": []},
        "k": 3,
    }
    assert (
        RewardFunction(lambda ground_truth, solution_str: solution_str + ground_truth)(sample()) == "#### 44"
    )


def test_options_win_over_what_the_row_says() -> None:
    assert RewardFunction(lambda ground_truth: ground_truth, {"ground_truth": "9"})(sample()) == "9"


def test_misfits_are_refused_before_the_first_call() -> None:
    with pytest.raises(ValueError, match="requires queries, which it is not given by keyword"):
        RewardFunction(lambda queries: 0)
    with pytest.raises(ValueError, match=r"need reward_model.reward_manager=batch"):
        RewardFunction(lambda solution_strs, ground_truths: 0)
    with pytest.raises(ValueError, match=r"set reward_model.reward_manager=naive"):
        RewardFunction(lambda solution_str, ground_truth: 0, takes_lists=True)
    with pytest.raises(ValueError, match=r"has \['methd'\].*Did you mean 'method'"):
        RewardFunction(lambda solution_str, method="strict": 0, {"methd": "flexible"})
    with pytest.raises(ValueError, match="cannot be called"):
        RewardFunction(3)  # type: ignore[arg-type]

    def positional(solution_str: str, /) -> float:
        return 0.0

    with pytest.raises(ValueError, match="not given by keyword"):
        RewardFunction(positional)


class Awaitable:
    async def __call__(self, solution_str: str) -> float:
        return float(len(solution_str))


def test_async_in_every_form() -> None:
    async def plain(solution_str: str) -> float:
        return 2.0

    assert RewardFunction(plain).is_async and RewardFunction(plain)(sample()) == 2.0
    assert RewardFunction(Awaitable()).is_async and RewardFunction(Awaitable())(sample()) == 6.0
    assert RewardFunction(lambda solution_str: plain(solution_str))(sample()) == 2.0  # not seen from outside


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    bad = tmp_path / "bad_syntax.py"
    bad.write_text("def compute_score(:\n    pass\n")
    with pytest.raises(
        ValueError, match=r"custom_reward_function.path=.*bad_syntax.py does not parse.*line 1"
    ):
        load_function(str(bad), "compute_score")
    fails = tmp_path / "fails.py"
    fails.write_text("import nothing_like_this\n")
    with pytest.raises(ValueError, match="fails while it is imported: ModuleNotFoundError"):
        load_function(str(fails), "compute_score")
    other = tmp_path / "other.py"
    other.write_text("def compute_scores(**k): return 1\n")
    with pytest.raises(ValueError, match="Did you mean 'compute_scores'"):
        load_function(str(other), "compute_score")
    with pytest.raises(ValueError, match="does not exist"):
        load_function(str(tmp_path / "absent.py"), "compute_score")


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.int64(-3), -3.0)]
    + [(np.array(2.0), 2.0), (np.array([2.0]), 2.0), (torch.tensor(0.5), 0.5), (torch.tensor([1]), 1.0)],
)
def test_numbers(value: Any, score: float) -> None:
    assert parse_verdict(value).score == score
    found = parse_verdict({"score": value, "note": "x"})
    assert found.score == score and found.extras == {"score": score, "note": "x"}


def test_extras_become_plain() -> None:
    extras = parse_verdict(
        {"score": 1, "acc": np.bool_(True), "parts": np.array([1, 2]), 7: torch.tensor(2.5), "pred": "a"}
    ).extras
    assert extras == {"score": 1.0, "acc": True, "parts": [1, 2], "7": 2.5, "pred": "a"}
    assert type(extras["acc"]) is bool
    assert parse_verdict({"score": 1, "pred": 10**400}).extras["pred"] == float("inf")  # no float holds it


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "nan, which is not a finite number"),
        (np.float32("inf"), "inf, which is not a finite number"),
        (-(10**400), "-inf, which is not a finite number"),
        (Fraction(10**400), "inf, which is not a finite number"),
        ("1.0", "'1.0' of type str"),
        ([1.0], "of type list"),
        (np.array([1.0, 2.0]), "of type ndarray"),
        (1j, "of type complex"),
        ({"acc": 1, "pred": "x"}, "without 'score', only acc, pred"),
        ({}, "without 'score', only nothing"),
        ({"score": None}, "None of type NoneType"),
    ],
)
def test_what_is_no_score(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_verdict(value)


def test_text_is_what_the_policy_said() -> None:
    # An answer, a tool's words, another answer.
    parts = [("call", 1), ("#### 9", 0), ("no", 1)]
    mask = [flag for text, flag in parts for _ in ids(text)] + [1]
    many = trajectory("call#### 9no", mask=mask, num_turns=4, turn_rewards={11: 0.5, 3: -1.0})
    one = build_samples([many, trajectory()], TOKENIZER)
    assert one[0].solution_str == "call\nno" and one[1].solution_str == "#### 4"
    assert one[0].extra_info == {"num_turns": 4, "turn_scores": [-1.0, 0.5]}
    assert build_samples([many], TOKENIZER, whole_transcript=True)[0].solution_str == "call#### 9no"


def test_an_empty_response_has_an_empty_text() -> None:
    empty = trajectory()
    empty.response, empty.mask, empty.log_probs = [], [], []
    assert build_samples([empty], TOKENIZER)[0].solution_str == ""
    only_tools = trajectory("#### 4", mask=[0] * 7)
    assert build_samples([only_tools], TOKENIZER)[0].solution_str == ""


def test_a_scorer_may_write_in_extra_info_without_touching_the_row() -> None:
    t = trajectory(extra_info={"level": 1})
    build_samples([t], TOKENIZER)[0].extra_info["level"] = 99
    assert t.prompt.extra_info == {"level": 1}


CLOSES = """
import os, sys
from strop.rewards.function import RewardFunction
from strop.rewards.base import build_samples
from tests.rewards.scene import TOKENIZER, trajectory

def closes(solution_str):
    {body}
    return 1.0

score = RewardFunction(closes)(build_samples([trajectory("a")], TOKENIZER)[0])
print("score", score)
sys.stderr.write("still here\\n")
file = open(os.devnull)
assert file.fileno() > 2, "a file took the place of a stream"
"""


@pytest.mark.parametrize(
    "body",
    [
        "sys.stdout.close()",
        "sys.stderr.close()",
        "sys.stdout.close(); sys.stderr.close(); sys.__stdout__.close()",
        "os.close(1)",
        "os.close(1); os.close(2)",
        "sys.stdout.close(); raise ValueError('no score')",
    ],
)
def test_a_function_that_closes_the_output(
    body: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a process of its own, forked from this one: the streams belong to the whole process."""
    child = os.fork()
    if child == 0:
        try:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            for number in (1, 2):
                os.dup2(os.open(tmp_path / str(number), os.O_WRONLY | os.O_CREAT), number)
            code = CLOSES.format(body=body)
            if "raise" in body:
                code = code.replace(
                    "score = Rew", "import contextlib\nwith contextlib.suppress(ValueError): Rew"
                )
                code = code.replace('"score", score', '"score", 1.0')
            exec(code, {})
            sys.stdout.flush()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the parent reads it
            os.write(os.open(tmp_path / "error", os.O_WRONLY | os.O_CREAT), repr(error).encode())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, (tmp_path / "error").read_text()
    lost = body.startswith("os.close(1); os")
    if not lost:
        assert "score 1.0" in (tmp_path / "1").read_text() + (tmp_path / "2").read_text()
        assert "still here" in (tmp_path / "1").read_text() + (tmp_path / "2").read_text()


def test_the_closed_output_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    reopen_streams("compute_score")
    assert not sys.stdout.closed
    assert [record.getMessage() for record in caplog.records] == [
        "The reward function compute_score closed stdout, which was opened again."
    ]
