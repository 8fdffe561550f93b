"""Programming problems: the share of tests that the program in the response passes, in a sandbox.

The ground truth holds the tests, in one of these forms, each of which may be JSON text:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                    a script: stdin and stdout
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [[3], ...]}      a function or a method of Solution
    [{"input": "1 2", "output": "3"}, ...]                                  a script, one mapping per test
    {"assert_case": ["assert add(1, 2) == 3", ...]}, or the list alone      assertions about the program
    {"test": "def check(candidate): ...", "entry_point": "add"}             the same, as in HumanEval
    "assert add(1, 2) == 3"                                                 the same
"""

from __future__ import annotations

import ast
import json
import logging
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.config.schema.reward import SandboxFusionConfig
from strop.rewards.rules.code_compare import same_output, same_value
from strop.rewards.rules.code_names import with_judge_names
from strop.rewards.sandbox.checker import UNSUPPORTED
from strop.rewards.sandbox.launch import choose_isolation, run_tests
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxLimits
from strop.rewards.sandbox.remote import run_remote_tests

logger = logging.getLogger(__name__)
MAX_TESTS = 10  # as in verl
MAX_SHOWN = 200  # characters of a wrong ground truth in an error message
_FENCE = re.compile(r"^[ \t]*```[ \t]*+([\w+#.-]*+)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON_FENCE = re.compile(r"(?i)```[ \t]*(?:python|py)3?(?![\w+#.-])[^\n`]*\n")
"""It may stand behind text, as in `<answer>```python`."""
_CLOSING_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_FAILURES = {
    "ok": "wrong answer",
    "error": "error",
    "timeout": "timed out",
    "memory": "out of memory",
    "output": "too much output",
    "disk": "too much on disk",
}


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    continuous: bool = True,
    max_tests: int = MAX_TESTS,
    sandbox: SandboxFusionConfig | None = None,
) -> dict[str, object]:
    """Return the share of the first `max_tests` tests that pass; without `continuous`, 1 if all pass, else 0.

    `acc` is 1 if all pass; `verdict` says how the first failing test failed. A failure of the sandbox raises,
    because it says nothing about the program.
    """
    tests = parse_tests(ground_truth, max_tests)
    settings = sandbox or SandboxFusionConfig()
    if not settings.url:
        # First: a machine that cannot isolate programs must show with any response.
        choose_isolation(settings.isolation)
    program = extract_program(solution_str)
    if program is None:
        return {"score": 0.0, "acc": 0.0, "verdict": "no program"}
    if "function" in tests[0].run:
        program = with_judge_names(program)
    outcomes = _run(program, [test.run for test in tests], settings)
    passed = 0
    verdict = "passed"
    for test, outcome in zip(tests, outcomes, strict=True):
        if test.passed(outcome):
            passed += 1
            continue
        if verdict == "passed":
            verdict = _FAILURES[outcome.status]
        if UNSUPPORTED in outcome.stderr:
            logger.warning(
                "A test of a programming problem fails for every program. %s", outcome.stderr[-500:]
            )
    acc = float(passed == len(tests))
    score = acc
    if continuous:
        score = passed / len(tests)
    return {"score": score, "acc": acc, "verdict": verdict}


def extract_program(solution_str: str) -> str | None:
    """Return the last Python block, else the last block without a language, else the text if it is a
    program."""
    for opening in reversed(list(_PYTHON_FENCE.finditer(solution_str))):
        text = _python_block(solution_str, opening.end())
        if text.strip():
            return text
    blocks: list[tuple[str, str]] = _FENCE.findall(solution_str)
    for language, text in reversed(blocks):
        if not language and text.strip():
            return textwrap.dedent(text)
    if not blocks and _is_program(solution_str):
        return solution_str
    return None


def _python_block(solution_str: str, start: int) -> str:
    """Return the block that begins at `start`. It ends at a fence in a line of its own, or behind a last line
    of code; a fence inside a text of the program does not end it."""
    closing = _CLOSING_FENCE.search(solution_str, start)
    end = len(solution_str) if closing is None else closing.start()
    text = textwrap.dedent(solution_str[start:end])  # a block in a list is indented
    if "```" not in text or _is_program(text):
        return text
    return text.partition("```")[0]


def _is_program(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _run(
    program: str, tests: Sequence[Mapping[str, object]], settings: SandboxFusionConfig
) -> list[ProgramOutcome]:
    limits = SandboxLimits(
        seconds=settings.timeout, total_seconds=settings.total_timeout, memory_mb=settings.memory_limit_mb
    )
    if settings.url:
        return run_remote_tests(
            program,
            tests,
            limits,
            url=settings.url,
            max_concurrent=settings.max_concurrent,
            shared_assertions=settings.shared_assertions,
        )
    return run_tests(program, tests, limits, level=choose_isolation(settings.isolation).level)


# --- Tests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramTest:
    """One test of a program, and the result that it expects."""

    run: dict[str, object]
    """The request to the sandbox."""
    expected: object = True
    """Text of the output, value of the function, or True for assertions."""

    def passed(self, outcome: ProgramOutcome) -> bool:
        """Whether the outcome is the expected one."""
        if outcome.status != "ok":
            return False
        if "stdin" in self.run:
            return same_output(outcome.stdout, str(self.expected))
        if not outcome.returned:  # it ended without a value, which is not None
            return False
        if "assertions" in self.run:
            return outcome.value is True
        if same_value(outcome.value, self.expected):
            return True
        # Some data sets put the value into a list.
        if not isinstance(self.expected, list) or len(self.expected) != 1:
            return False
        return same_value(outcome.value, self.expected[0])


def parse_tests(ground_truth: object, limit: int | None = None) -> list[ProgramTest]:
    """Return the first `limit` tests; ValueError if the ground truth has none of the known forms."""
    truth = _to_plain(ground_truth)
    if isinstance(truth, str):
        truth = _decode(truth)
    tests: list[ProgramTest] | None = None
    if isinstance(truth, Mapping):
        tests = _mapping_tests(truth)
    elif isinstance(truth, list):
        tests = _list_tests(truth)
    elif isinstance(truth, str) and "assert" in truth:
        tests = [ProgramTest({"assertions": truth})]
    if tests is None:
        raise ValueError(
            f"The ground truth of a programming problem has no tests in a known form: {_shown(truth)}"
        )
    if not tests:
        raise ValueError(
            f"The ground truth of a programming problem has an empty list of tests: {_shown(truth)}"
        )
    return tests[:limit]


def _list_tests(items: list[object]) -> list[ProgramTest] | None:
    """Return the tests of a list of mappings or of assertions, None for any other list."""
    mappings = [item for item in items if isinstance(item, Mapping)]
    assertions = [item for item in items if isinstance(item, str)]
    if items and len(assertions) == len(items):
        return [ProgramTest({"assertions": text}) for text in assertions]
    if not items or len(mappings) != len(items):
        return None
    tests = []
    for item in mappings:
        stdin = _first_value(item, "input", "stdin")
        expected = _first_value(item, "output", "expected_output")
        tests.append(_script_test(stdin, expected))
    return tests


def _mapping_tests(truth: Mapping[str, object]) -> list[ProgramTest]:
    cases = truth.get("assert_case")
    if cases:
        if not isinstance(cases, list):
            cases = [cases]
        return [ProgramTest({"assertions": case}) for case in cases]
    if truth.get("test"):
        assertions = truth["test"]
        if truth.get("entry_point"):
            assertions = f"{assertions}\ncheck({truth['entry_point']})\n"
        return [ProgramTest({"assertions": assertions})]
    inputs = _first_value(truth, "inputs", "input")
    outputs = _first_value(truth, "outputs", "output")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(
            "The ground truth of a programming problem needs lists `inputs` and `outputs` of one length, not "
            f"{_shown(truth)}"
        )
    name = truth.get("fn_name")
    tests = []
    for given, expected in zip(inputs, outputs):
        if name:
            tests.append(_function_test(str(name), given, expected))
        else:
            tests.append(_script_test(given, expected))
    return tests


def _script_test(stdin: object, expected: object) -> ProgramTest:
    return ProgramTest({"stdin": _join_lines(stdin)}, _join_lines(expected))


def _function_test(name: str, arguments: object, expected: object) -> ProgramTest:
    if isinstance(arguments, str):  # one argument per line, and the value, as JSON text
        arguments = [_decode(line) for line in arguments.splitlines() if line.strip()]
        if isinstance(expected, str):
            expected = _decode(expected)
    elif not isinstance(arguments, list):
        arguments = [arguments]
    return ProgramTest({"function": name, "arguments": arguments}, expected)


def _join_lines(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _first_value(truth: Mapping[str, object], *names: str) -> object:
    for name in names:
        if name in truth:
            return truth[name]
    raise ValueError(
        f"A test of a programming problem needs {' or '.join(map(repr, names))}, it has "
        f"{', '.join(map(str, truth))}."
    )


def _decode(text: str) -> object:
    """Return the value of JSON text; other text unchanged."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def _to_plain(value: object) -> object:
    """Return arrays of a parquet reader as lists, at every depth, without null fields (columns of other
    rows)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return text[: MAX_SHOWN - 3] + "..."
