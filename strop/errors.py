"""The border between a mistake of the user, which gets one clear message, and a mistake of ours, which gets a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


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
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        sys.stderr.write("strop: interrupted\n")
        return 130
