"""What a process writes, passed on as it comes; its last lines are remembered for whoever has to explain its end."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LINES = 20


class Tail:
    def __init__(self, pipe: BinaryIO, pass_on: Callable[[str], object], keep_in: Path | None = None) -> None:
        """Read `pipe` to its end in a thread; everything also goes to the file `keep_in`."""
        self._pipe, self._pass_on, self._keep_in = pipe, pass_on, keep_in
        self._lines: deque[str] = deque(maxlen=LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.ExitStack() as opened:
            file = None
            if self._keep_in is not None:
                with contextlib.suppress(OSError):  # a log file is not worth a run
                    self._keep_in.parent.mkdir(parents=True, exist_ok=True)
                    file = opened.enter_context(self._keep_in.open("w", errors="replace"))
            for raw in opened.enter_context(self._pipe):
                line = raw.decode(errors="replace")
                self._lines.append(line.rstrip("\n"))
                self._pass_on(line)
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.write(line)
                        file.flush()

    def last(self, wait: float = 1.0) -> tuple[str, ...]:
        """The last lines. A process that has ended may have children that hold the pipe, so it is not waited for long."""
        self._thread.join(wait)
        return tuple(self._lines)
