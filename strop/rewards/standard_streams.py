"""stdout and stderr of the process after a call of a user's reward function, which may have closed them."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)

STREAMS = {"stdout": 1, "stderr": 2}
"""Names in `sys` and file descriptors."""


def reopen_streams(function: str) -> None:
    """Open stdout and stderr again if a reward function closed them: the run writes to both, and a file that
    is opened later would get the free descriptor and be written over."""
    reopened: list[str] = []
    for name, number in STREAMS.items():
        stream = getattr(sys, name)
        lost = _reopen_descriptor(number)
        if stream is not None and stream.closed:
            again = getattr(sys, f"__{name}__")
            if again is None or again.closed:
                again = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
            setattr(sys, name, again)
            lost = True
        if lost:
            reopened.append(name)
    for name in reopened:  # only now: logging writes to stderr, which may be the second stream
        log.warning("The reward function %s closed %s, which was opened again.", function, name)


def _reopen_descriptor(number: int) -> bool:
    """Point a closed descriptor to the other stream, or to nothing; returns whether it was closed."""
    try:
        os.fstat(number)
        return False
    except OSError:
        pass
    try:
        os.dup2(3 - number, number)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != number:
            os.dup2(null, number)
            os.close(null)
    return True
