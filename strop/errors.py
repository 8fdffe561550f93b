"""The border between a mistake of the user, which gets one clear message, and a mistake of ours, which gets a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

REFUSED = 1
"""Exit code of a mistake of the user: the message says what to set, and trying again would say it again."""
CRASHED = 70
"""Exit code of an error nobody expected: trying again may help."""


def exit_code(error: BaseException) -> int:
    """Of a process that ends with this error; an error may bring its own."""
    return int(getattr(error, "exit_code", REFUSED if isinstance(error, ValueError | OSError) else CRASHED))


def answer(program: Callable[[], int]) -> int:
    """Run a command; a user's mistake prints its message and gives exit code 1. STROP_DEBUG=1 shows where it came from."""
    try:
        return program()
    except (ValueError, OSError) as error:
        if os.environ.get("STROP_DEBUG") == "1":
            traceback.print_exc()
        if not getattr(error, "told_by_another", False):
            for line in str(error).splitlines() or [type(error).__name__]:
                sys.stderr.write(f"strop: error: {line}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        sys.stderr.write("strop: interrupted\n")
        return 130
