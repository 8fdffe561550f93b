"""The code reward: which program is taken, what counts as the right answer, and that a broken sandbox is no zero."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.schema.reward import SandboxFusionConfig
from strop.rewards.function import score_response
from strop.rewards.rules import code as code_tests
from strop.rewards.rules.code import compute_score, extract_program, same_output, same_value
from strop.rewards.rules.code_names import with_judge_names
from strop.rewards.sandbox.limits import SandboxError
from tests.rewards.scene import scorer, trajectory
from tests.rewards.test_remote import Server

SUM = {"inputs": ["1 2\n", "3 4\n", "-1 1\n", "10 20\n"], "outputs": ["3\n", "7\n", "0\n", "30\n"]}
GOOD = "Add them:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
QUICK = SandboxFusionConfig(timeout=60.0, total_timeout=100.0)
SHORT = SandboxFusionConfig(timeout=1.0, total_timeout=6.0)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nfirst\n```\nno:\n```py\nsecond\n```", "second\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nreal\n```\nOutput:\n```\n3\n```", "real\n"),
        ("```cpp\nint main() {}\n```", None),
        ("```python\ncut_off = 1", "cut_off = 1"),
        ("1. So:\n   ```python\n   if x:\n       y = 1\n   ```", "if x:\n    y = 1\n"),
        ("print(1)", "print(1)"),
        ("I cannot do that.", None),
        ("", None),
        ("```python\n\n```", None),
        ("<answer>```python\nprint(1)\n```</answer>", "print(1)\n"),
        ("The code: ```Python3\nprint(1)\n```\nDone.", "print(1)\n"),
        ("- ```python\n  print(1)\n  ```", "print(1)\n"),
        ("```python\nprint(1)```", "print(1)"),
        ("```python\nprint(1)``` prints it.\n```py\nprint(2)```\nDone.", "print(2)"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("It begins with ```python-repl\n>>> 1\n", None),
    ],
)
def test_the_program_of_a_response(text, program):
    assert extract_program(text) == program


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["```", "```python\n", "\n", "print(1)", "x", "`", "   ", "\x00", "(" * 300]),
        max_size=12,
    ).map("".join)
)
def test_no_text_makes_extraction_raise(text):
    assert extract_program(text) is None or isinstance(extract_program(text), str)


def test_the_share_of_tests_that_pass():
    assert compute_score(GOOD, SUM) == {"score": 1.0, "acc": 1.0, "verdict": "passed"}
    half = "```python\na, b = map(int, input().split())\nprint(a + b if a < 5 and a > 0 else 1)\n```"
    assert compute_score(half, json.dumps(SUM)) == {"score": 0.5, "acc": 0.0, "verdict": "wrong answer"}
    assert compute_score(half, SUM, continuous=False)["score"] == 0.0
    assert compute_score("No idea!", SUM) == {"score": 0.0, "acc": 0.0, "verdict": "no program"}


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("while True: pass", "timed out"),
        ("1 / 0", "error"),
        ("x = bytearray(1 << 40)", "error"),
        ("while True: print('x' * 10**6)", "too much output"),
        ("if", "error"),
    ],
)
def test_verdicts(program, verdict):
    sandbox = SHORT if verdict == "timed out" else QUICK
    result = compute_score(f"```python\n{program}\n```", SUM, sandbox=sandbox, max_tests=1)
    assert (result["score"], result["verdict"]) == (0.0, verdict)


def test_only_the_first_tests_are_run():
    many = {"inputs": ["1 2\n"] * 12, "outputs": ["3"] * 10 + ["wrong"] * 2}
    assert compute_score(GOOD, many)["score"] == 1.0
    assert compute_score(GOOD, many, max_tests=12)["score"] == pytest.approx(10 / 12)


def test_functions_and_methods():
    truth = {"fn_name": "twice", "inputs": [[1], ["ab"]], "outputs": [[2], ["abab"]]}
    assert compute_score("```python\ndef twice(x): return x * 2\n```", truth)["score"] == 1.0
    assert (
        compute_score("```python\nclass Solution:\n    def twice(self, x): return x * 2\n```", truth)["score"]
        == 1.0
    )
    assert compute_score("```python\ndef thrice(x): return x * 3\n```", truth)["score"] == 0.0
    lines = {"fn_name": "add", "inputs": ["[1, 2]\n3", '["a"]\n"b"'], "outputs": ["[1, 2, 3]", '["a", "b"]']}
    assert (
        compute_score("```python\ndef add(items, x): return tuple(items) + (x,)\n```", lines)["score"] == 1.0
    )


def test_functions_have_the_names_of_a_judge_and_scripts_have_not():
    """As in LeetCode's form: annotations and containers that the program does not import."""
    truth = {"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [3]}
    method = "class Solution:\n    def total(self, values: List[int]) -> Optional[int]:\n"
    assert compute_score(f"```python\n{method}        return sum(deque(values))\n```", truth)["score"] == 1.0
    assert compute_score(f"```python\n{method}        return missing(values)\n```", truth)["score"] == 0.0
    script = "```python\nprint(math.gcd(*map(int, input().split())) + 2)\n```"
    assert compute_score(script, {"inputs": ["1 2"], "outputs": ["3"]})["score"] == 0.0


@pytest.mark.parametrize(
    ("program", "imports"),
    [
        ("def f(x: List[int]): return math.floor(x[0])", "from typing import List\nimport math\n"),
        ("def f(x): return heappop(x)", "from heapq import heappop\n"),
        ("from collections import deque\ndef f(List): return deque(copy)", "import copy\n"),
        ("def deque(x): return sum(x)", ""),
        ("import math as re\nre.e", ""),
        ("from __future__ import annotations\nList", ""),
        ("List[", ""),
        ("-" * 50_000 + "List", ""),
    ],
)
def test_names_that_a_program_does_not_define_are_imported_before_it(program, imports):
    assert with_judge_names(program) == imports + program


@pytest.mark.parametrize(
    "truth",
    [
        {"assert_case": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},
        ["assert add(1, 2) == 3"],
        "assert add(1, 2) == 3\nassert add(2, 2) == 4",
        {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
    ],
)
def test_assertions(truth):
    assert compute_score("```python\ndef add(a, b): return a + b\n```", truth)["score"] == 1.0
    assert compute_score("```python\ndef add(a, b): return a - b\n```", truth)["score"] < 1.0
    assert compute_score("```python\nimport os\nos._exit(0)\n```", truth)["score"] == 0.0


def test_scripts_as_a_list_of_mappings_and_as_arrays():
    assert (
        compute_score(GOOD, [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}])["score"]
        == 1.0
    )
    arrays = {
        "inputs": np.array(["1 2", "3 4"], dtype=object),
        "outputs": np.array(["3", "7"], dtype=object),
        "fn_name": None,
    }
    assert compute_score(GOOD, arrays)["score"] == 1.0
    lines = {"inputs": [["1 2", "ignored"]], "outputs": [["3"]]}
    assert compute_score(GOOD, lines)["score"] == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "",
        "42",
        {},
        [],
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        [{"in": 1}],
    ],
)
def test_a_ground_truth_without_tests_is_an_error_not_a_zero(truth):
    with pytest.raises(ValueError, match="programming problem"):
        compute_score(GOOD, truth)


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("3", "3\n", True),
        ("3 \n4\n\n", "3\n4", True),
        ("0.3333333", "0.33333334", True),
        ("1.0", "1", True),
        ("1000000007", "1000000008", False),
        ("12345678901234567890", "12345678901234567891", False),
        ("3 4", "3\n4", False),
        ("2\n1", "1\n2", False),
        ("YES", "Yes", False),
        ("nan", "nan", True),
        ("", "", True),
        ("1 2 3", "1 2", False),
        ("0x10", "16", False),
    ],
)
def test_outputs(written, expected, same):
    assert same_output(written, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 1], False),
        (10**18, 10**18 + 1, False),
        ({"1": 2}, {1: 2}, True),
        (None, None, True),
        ("1", 1, False),
    ],
)
def test_values(value, expected, same):
    assert same_value(value, expected) is same


def test_apps_wraps_values_in_a_list():
    [test] = code_tests.parse_tests({"fn_name": "f", "inputs": [[1]], "outputs": [[[1, 2]]]})
    from strop.rewards.sandbox.limits import ProgramOutcome

    assert test.passed(ProgramOutcome("ok", value=[1, 2], returned=True))
    assert test.passed(ProgramOutcome("ok", value=[[1, 2]], returned=True))
    assert not test.passed(ProgramOutcome("ok", value=[1], returned=True))
    assert not test.passed(ProgramOutcome("timeout", value=[1, 2], returned=True))


# --- in the reward loop ---------------------------------------------------------------------------------------------------------


def test_the_data_sources_of_verl_have_this_scorer():
    for source in ("codecontests", "apps", "codeforces", "taco"):
        assert score_response(source, GOOD, SUM)["acc"] == 1.0  # type: ignore[index]


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_trajectories_are_scored(manager):
    texts = [GOOD, "```python\nprint(3)\n```", "no!"]
    rows = [trajectory(text, row=n, source="taco", truth=json.dumps(SUM)) for n, text in enumerate(texts)]
    judge = scorer(reward_manager=manager, num_workers=2)
    report = judge.score(rows)
    judge.close()
    assert [row.score for row in rows] == [1.0, 0.25, 0.0]
    assert [row.extras["verdict"] for row in rows] == ["passed", "wrong answer", "no program"]
    assert report.metrics["reward/acc/mean"] == pytest.approx(1 / 3)


def test_settings_reach_the_sandbox():
    slow = trajectory(
        "```python\nimport time; time.sleep(300); print(3)\n```",
        source="apps",
        truth=json.dumps({"inputs": [""], "outputs": ["3"]}),
    )
    start = time.monotonic()
    scorer(sandbox_fusion=SandboxFusionConfig(timeout=0.5)).score([slow])
    assert slow.score == 0.0 and slow.extras["verdict"] == "timed out" and time.monotonic() - start < 100


def test_a_broken_sandbox_masks_the_sample(monkeypatch):
    from strop.rewards.sandbox import launch

    good = trajectory(GOOD, source="apps", truth=json.dumps(SUM), row=0)
    plain = trajectory("#### 4", row=1)
    monkeypatch.setattr(launch, "_COMMAND", ["/bin/false"])
    report = scorer().score([good, plain])
    assert good.score is None and plain.score == 1.0 and report.failed == 1


# --- a sandbox server -----------------------------------------------------------------------------------------------------------


def fusion(question: dict[str, Any]) -> tuple[int, Any]:
    """A stand-in for SandboxFusion: runs the script."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", question["code"]],
            input=question["stdin"],
            capture_output=True,
            text=True,
            timeout=question["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        return 200, {
            "status": "Failed",
            "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""},
        }
    result = {
        "status": "Finished",
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "execution_time": 0.1,
    }
    return 200, {"status": "Success" if done.returncode == 0 else "Failed", "run_result": result}


@pytest.fixture
def server():
    made = Server(fusion)
    yield made
    made.close()


def test_a_sandbox_server_is_asked(server):
    remote = SandboxFusionConfig(url=server.url, timeout=60.0, memory_limit_mb=77)
    assert compute_score(GOOD, SUM, sandbox=remote)["score"] == 1.0
    asked = server.questions[0]
    assert (
        asked["language"] == "python"
        and asked["stdin"] == "1 2\n"
        and asked["memory_limit_MB"] == 77
        and asked["run_timeout"] <= 60
    )
    truth = {"fn_name": "twice", "inputs": [[1], ["ab"]], "outputs": [[2], ["abab"]]}
    assert (
        compute_score(
            "```python\nprint('hello')\nclass Solution:\n    def twice(self, x): return x * 2\n```",
            truth,
            sandbox=remote,
        )["score"]
        == 1.0
    )
    for program, value in (
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return 0", 0.0),
        ("raise SystemExit(0)", 0.0),
    ):
        assert (
            compute_score(f"```python\n{program}\n```", ["assert add(1, 2) == 3"], sandbox=remote)["score"]
            == value
        )
    late = SandboxFusionConfig(url=server.url, timeout=0.5)
    assert (
        compute_score("```python\nwhile True: pass\n```", SUM, sandbox=late, max_tests=1)["verdict"]
        == "timed out"
    )


@pytest.mark.parametrize(
    "answer",
    [(400, {"error": "bad"}), (200, {"status": "SandboxError", "message": "full"}), (200, {"nothing": 1})],
)
def test_a_server_that_fails_is_an_error_not_a_zero(answer):
    server = Server(lambda _: answer)
    with pytest.raises(SandboxError, match="sandbox server"):
        compute_score(GOOD, SUM, sandbox=SandboxFusionConfig(url=server.url))
    server.close()
