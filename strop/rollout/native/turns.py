"""Threads take turns at the interpreter quickly while an engine steps beside coroutines.

Every call into torch lets go of the interpreter for a moment. If another thread computes in Python then, the engine waits for
its turn, by default 5 ms each time, so that it makes 80 calls a second instead of 90,000. A GPU has nothing to do meanwhile. On
a processor calls are long, and the others' time is better spent in longer turns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TURN = 5e-4
"""Seconds."""


class _Turns:
    """The interval is the whole program's, and engines may come and go in any order: the last one sets it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines, self._usual = 0, 0.0

    @contextmanager
    def quick(self) -> Iterator[None]:
        with self._lock:
            if self._engines == 0:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _TURN))
            self._engines += 1
        try:
            yield
        finally:
            with self._lock:
                self._engines -= 1
                if self._engines == 0:
                    sys.setswitchinterval(self._usual)


quick_turns = _Turns().quick
