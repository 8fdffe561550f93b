"""Run tests on a sandbox server that speaks SandboxFusion's protocol.

POST {"code", "stdin", "language": "python", "run_timeout", "memory_limit_MB", ...}
-> {"status": "Success" | "Failed" | "SandboxError",
    "run_result": {"status", "return_code", "stdout", "stderr", ...}}
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from strop.rewards.http import post_json
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxError, SandboxLimits
from strop.rewards.sandbox.literal_calls import all_hold, split_assertions, values_script

logger = logging.getLogger(__name__)
GRACE = 10.0  # seconds for the network


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
) -> list[ProgramOutcome]:
    """Do the same as `launch.run_tests` on the server at `url`; SandboxError if it does not answer."""
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
        return (
            f"{program}\n\nimport json as _json\nprint('\\n{marker}' + _json.dumps({call}, default=list))\n"
        )
    if "assertions" in test:
        split = split_assertions(str(test["assertions"]))
        if split:
            return f"{program}\n\n{values_script(split, marker)}\n"
        _warn_of_shared_process()
        return f"{program}\n\n{test['assertions']}\nprint('\\n{marker}true')\n"
    return program


@functools.cache
def _warn_of_shared_process() -> None:
    logger.warning(
        "Assertions that are not of the form `assert f(literals) == literal` run in the process of the "
        "program on a sandbox server, where a program can deceive them. The local sandbox runs them in "
        "another process."
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
