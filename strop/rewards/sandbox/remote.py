"""Run tests on a sandbox server that speaks SandboxFusion's protocol.

POST {"code", "stdin", "language": "python", "run_timeout", "memory_limit_MB", ...}
-> {"status": "Success" | "Failed" | "SandboxError",
    "run_result": {"status", "return_code", "stdout", "stderr", ...}}
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from strop.rewards.http import post_json
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxError, SandboxLimits
from strop.rewards.sandbox.literal_calls import all_hold, split_assertions, values_script

GRACE = 10.0  # seconds for the network
MAX_SHOWN = 200
"""Characters of a test in a message."""


@functools.cache
def _slots(url: str, max_concurrent: int) -> threading.BoundedSemaphore:
    """Return the semaphore that limits concurrent requests to a server."""
    return threading.BoundedSemaphore(max_concurrent)


def run_remote_tests(
    program: str,
    tests: Sequence[Mapping[str, object]],
    limits: SandboxLimits,
    *,
    url: str,
    max_concurrent: int,
    shared_assertions: bool = False,
) -> list[ProgramOutcome]:
    """Do the same as `launch.run_tests` on the server at `url`; SandboxError if it does not answer.

    `shared_assertions`: assertions that cannot be split run in the process of the program; else ValueError.
    """
    if not shared_assertions:
        _refuse_shared_assertions(tests)
    deadline = time.monotonic() + limits.total_seconds
    outcomes = []
    for test in tests:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            outcomes.append(ProgramOutcome("timeout"))
            continue
        marker = secrets.token_hex(16)
        request = {
            "code": build_script(program, test, marker),
            "stdin": test.get("stdin", ""),
            "language": "python",
            "compile_timeout": limits.seconds,
            "run_timeout": min(remaining, limits.seconds),
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        with _slots(url, max_concurrent):
            reply = _post(url, request, limits.seconds + GRACE)
        outcomes.append(parse_outcome(reply, marker, test))
    return outcomes


def build_script(program: str, test: Mapping[str, object], marker: str) -> str:
    """Return a script that prints the function's value, or true after the assertions, on a line after
    `marker`."""
    if "function" in test:
        name = test["function"]
        arguments = json.dumps(test["arguments"])
        call = f"(globals().get({name!r}) or getattr(Solution(), {name!r}))(*_json.loads({arguments!r}))"
        plain = "lambda value: value.tolist() if hasattr(value, 'tolist') else list(value)"
        return (
            f"{program}\n\nimport json as _json\n"
            f"print('\\n{marker}' + _json.dumps({call}, default={plain}))\n"
        )
    if "assertions" in test:
        split = split_assertions(str(test["assertions"]))
        if split:
            return f"{program}\n\n{values_script(split, marker)}\n"
        return f"{program}\n\n{test['assertions']}\nprint('\\n{marker}true')\n"
    return program


def _refuse_shared_assertions(tests: Sequence[Mapping[str, object]]) -> None:
    for test in tests:
        text = str(test.get("assertions", ""))
        if text and split_assertions(text) is None:
            raise ValueError(
                "A sandbox server runs one script per test, so these assertions would run in the process of "
                f"the program, which can deceive them: {text[:MAX_SHOWN]!r}. Only the forms `assert "
                "f(literals) == literal` and `assert abs(f(literals) - number) < number` are compared "
                "outside. Unset reward_model.sandbox_fusion.url to use the local sandbox, which runs all "
                "assertions in a process of their own, or set "
                "reward_model.sandbox_fusion.shared_assertions=true."
            )


def parse_outcome(reply: object, marker: str, test: Mapping[str, object]) -> ProgramOutcome:
    """Return the outcome of a test that a server's reply describes."""
    result = None
    if isinstance(reply, Mapping) and reply.get("status") != "SandboxError":
        result = reply.get("run_result")
    if not isinstance(result, Mapping):
        raise SandboxError(f"The sandbox server could not run the program: {str(reply)[:300]}")
    stdout = str(result.get("stdout") or "")
    value: object = None
    returned = False
    stdout, found, value_text = stdout.partition(f"\n{marker}")
    split = split_assertions(str(test.get("assertions", "")))
    if found and split:
        returned = all_hold(split, value_text)
        value = returned or None
    elif found:
        # A program may print more behind its value; then it has none.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value_text)
            returned = True
    exit_code = result.get("return_code")
    status = "error"
    if result.get("status") == "TimeLimitExceeded":
        status = "timeout"
    elif result.get("status") == "Finished" and exit_code == 0:
        status = "ok"
    return ProgramOutcome(
        status,
        stdout,
        str(result.get("stderr") or ""),
        exit_code,
        float(result.get("execution_time") or 0.0),
        value,
        returned,
    )


def _post(url: str, request: Mapping[str, object], seconds: float) -> object:
    try:
        return post_json(lambda: url, request, what="sandbox server", timeout=seconds)[0]
    except OSError as error:
        raise SandboxError(str(error)) from error
