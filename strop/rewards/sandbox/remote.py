"""Tests in a sandbox that is a server of its own and speaks SandboxFusion's protocol.

POST {"code", "stdin", "language": "python", "run_timeout", "memory_limit_MB", ...}
-> {"status": "Success" | "Failed" | "SandboxError", "run_result": {"status", "return_code", "stdout", "stderr", ...}}
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from strop.rewards.post import post_json
from strop.rewards.sandbox.limits import Limits, Outcome, SandboxError

GRACE = 10.0  # seconds for the way to the server and back


@functools.cache
def _slots(url: str, at_once: int) -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(at_once)


def run_remote_tests(
    program: str, tests: Sequence[Mapping[str, Any]], limits: Limits, *, url: str, at_once: int
) -> list[Outcome]:
    """As `launch.run_tests`, on the server at `url`; SandboxError if it gives no answer."""
    deadline = time.monotonic() + limits.total_seconds
    outcomes = []
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            outcomes.append(Outcome("timeout"))
            continue
        mark = secrets.token_hex(16)
        request = {
            "code": script_of(program, test, mark),
            "stdin": test.get("stdin", ""),
            "language": "python",
            "compile_timeout": limits.seconds,
            "run_timeout": min(left, limits.seconds),
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        with _slots(url, at_once):
            outcomes.append(outcome_of(_ask(url, request, limits.seconds + GRACE), mark))
    return outcomes


def script_of(program: str, test: Mapping[str, Any], mark: str) -> str:
    """A script that prints the value of a function, or that all assertions held, on a line that begins with `mark`."""
    if "function" in test:
        name, arguments = test["function"], json.dumps(test["arguments"])
        call = f"(globals().get({name!r}) or getattr(Solution(), {name!r}))(*_json.loads({arguments!r}))"
        return f"{program}\n\nimport json as _json\nprint('\\n{mark}' + _json.dumps({call}, default=list))\n"
    if "assertions" in test:
        return f"{program}\n\n{test['assertions']}\nprint('\\n{mark}true')\n"
    return program


def outcome_of(reply: Any, mark: str) -> Outcome:
    result = reply.get("run_result") if isinstance(reply, Mapping) else None
    if not isinstance(result, Mapping) or reply.get("status") == "SandboxError":
        raise SandboxError(f"The sandbox server could not run the program: {str(reply)[:300]}")
    stdout, value = str(result.get("stdout") or ""), None
    if mark in stdout:
        stdout, _, told = stdout.partition(f"\n{mark}")
        value = json.loads(told)
    code = result.get("return_code")
    if result.get("status") == "TimeLimitExceeded":
        status = "timeout"
    else:
        status = "ok" if result.get("status") == "Finished" and code == 0 else "error"
    return Outcome(status, stdout, str(result.get("stderr") or ""), code, float(result.get("execution_time") or 0.0), value)


def _ask(url: str, request: Mapping[str, Any], seconds: float) -> Any:
    try:
        return post_json(lambda: url, request, what="sandbox server", timeout=seconds)[0]
    except OSError as error:
        raise SandboxError(str(error)) from error
