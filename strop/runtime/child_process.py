"""The processes of ranks, as their parent sees them: their environment and what they write.

Used by the launcher of one machine (local.py) and by the launcher on a Ray cluster (ray/rank_launcher.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LAUNCHED = "STROP_LAUNCHED"
"""Environment variable with the process id of the launcher. It is set for ranks whose launcher has run the
preflight; these ranks exit when the launcher is gone."""
TAIL_LINES = 20
"""Output lines that are kept for error messages."""


def omp_threads_per_rank(ranks_on_machine: int) -> str:
    """Return OMP_NUM_THREADS for each rank: the processors of the machine divided by its ranks."""
    return str(max(1, (os.cpu_count() or 1) // ranks_on_machine))


class OutputTail:
    """Forwards the output of a process line by line and keeps its last lines."""

    def __init__(
        self, pipe: BinaryIO, forward: Callable[[str], object], log_path: Path | None = None
    ) -> None:
        """Read `pipe` to its end in a thread; also write everything to the file `log_path`."""
        self._pipe = pipe
        self._forward = forward
        self._log_path = log_path
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.ExitStack() as stack:
            file = None
            if self._log_path is not None:
                with contextlib.suppress(OSError):  # a missing log file must not end the run
                    self._log_path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(self._log_path.open("w", errors="replace"))
            for raw in stack.enter_context(self._pipe):
                line = raw.decode(errors="replace")
                self._lines.append(line.rstrip("\n"))
                self._forward(line)
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.write(line)
                        file.flush()

    def last_lines(self, timeout: float = 1.0) -> tuple[str, ...]:
        """Return the last lines. The wait is short: children of the process may keep the pipe open."""
        self._thread.join(timeout)
        return tuple(self._lines)
