"""Programming problems: the share of tests that the program in the response passes, in a sandbox."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from strop.config.schema.reward import SandboxFusion
from strop.rewards.rules.code_tests import tests_of
from strop.rewards.sandbox.isolation import isolation
from strop.rewards.sandbox.launch import run_tests
from strop.rewards.sandbox.limits import Limits, Outcome
from strop.rewards.sandbox.remote import run_remote_tests

MOST_TESTS = 10  # as verl does
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3", "py3")
_WORDS = {
    "ok": "wrong answer",
    "error": "error",
    "timeout": "timed out",
    "memory": "out of memory",
    "output": "too much output",
}


def extract_program(solution_str: str) -> str | None:
    """The last block of Python, else the last block without a language, else the whole text if it is a program."""
    blocks = [(found.group(1).lower(), found.group(2)) for found in _FENCE.finditer(solution_str)]
    for wanted in (_PYTHON, ("",)):
        programs = [text for language, text in blocks if language in wanted and text.strip()]
        if programs:
            return programs[-1]
    return solution_str if not blocks and _parses(solution_str) else None


def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    continuous: bool = True,
    max_tests: int = MOST_TESTS,
    sandbox: SandboxFusion | None = None,
) -> dict[str, Any]:
    """The share of the first `max_tests` tests that pass; without `continuous`, 1 if all do and else 0.

    `acc` is 1 if all pass; `verdict` says what became of the first test that failed. A sandbox that fails raises: nothing is
    known about the program then.
    """
    tests = tests_of(ground_truth, max_tests)
    program = extract_program(solution_str)
    if program is None:
        return {"score": 0.0, "acc": 0.0, "verdict": "no program"}
    outcomes = _run(program, [test.run for test in tests], sandbox or SandboxFusion())
    passed = [test.passed(outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    share, everything = sum(passed) / len(passed), float(all(passed))
    verdict = next((_WORDS[outcome.status] for outcome, good in zip(outcomes, passed) if not good), "passed")
    return {"score": share if continuous else everything, "acc": everything, "verdict": verdict}


def _run(program: str, tests: list[dict[str, Any]], settings: SandboxFusion) -> list[Outcome]:
    limits = Limits(seconds=settings.timeout, total_seconds=settings.total_timeout, memory_mb=settings.memory_limit_mb)
    if settings.url:
        return run_remote_tests(program, tests, limits, url=settings.url, at_once=settings.max_concurrent)
    return run_tests(program, tests, limits, level=isolation(settings.isolation).level)


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
