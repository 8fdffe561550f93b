"""How much a program may use, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0
    """For one test, by the clock."""
    total_seconds: float = 60.0
    """For all tests of a program together; those that do not get their turn count as late."""
    memory_mb: int = 1024
    """Address space of every process, and memory of all of them together."""
    disk_mb: int = 64
    """All files together (namespaces, bubblewrap), or the largest file."""
    processes: int = 16
    """Processes and threads."""
    open_files: int = 128
    output_bytes: int = 1 << 20
    """Of standard output, and of errors; more ends the program."""


@dataclass(frozen=True)
class Outcome:
    """What a program did with one test."""

    status: str
    """ok | error (an exception, or an exit code) | timeout | memory | output."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """Negative: ended by that signal."""
    seconds: float = 0.0
    value: Any = None
    """Of the function that the test calls, as JSON knows it; True if all assertions held. None if it was not reached."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, so nothing is known about the program."""
