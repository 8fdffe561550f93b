"""Exit codes and error output of commands: a user error prints one clear message, an unexpected error prints
a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

REFUSED = 1
"""Exit code of a user error: the message says what to set. A retry would fail again."""
CRASHED = 70
"""Exit code of an unexpected error. A retry may succeed."""
STOPPED = 79
"""Exit code of a run that a signal ended after it had saved its state: the same command goes on from it."""

ERROR_PREFIX = "strop: error: "
"""Begins each line of a message about an error."""


def exit_code(error: BaseException) -> int:
    """Exit code of a process that ends with this error: the error's own `exit_code`, or that of its type."""
    default = CRASHED
    if isinstance(error, ValueError | OSError):
        default = REFUSED
    return int(getattr(error, "exit_code", default))


def answer(program: Callable[[], int]) -> int:
    """Run a command and return its exit code. A user error prints its message; STROP_DEBUG=1 adds the
    traceback."""
    try:
        return program()
    except (ValueError, OSError) as error:
        if os.environ.get("STROP_DEBUG") == "1":
            traceback.print_exc()
        if not getattr(error, "reported_by_other_rank", False):
            for line in str(error).splitlines() or [type(error).__name__]:
                sys.stderr.write(f"{ERROR_PREFIX}{line}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        sys.stderr.write("strop: interrupted\n")
        return 130
