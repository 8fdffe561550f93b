"""Which walls this machine can build, tried out rather than guessed.

| level      | network | other processes, files, environment    | processes | needs                                       |
| namespaces | none    | out of sight                           | limited   | root, or user namespaces for anybody        |
| bubblewrap | none    | out of sight                           | limited   | `bwrap`, for users whom only it may isolate |
| user       | open    | by the rights of an unknown user       | limited   | root                                        |
| limits     | open    | as the user who trains: can be harmed  | limited   | nothing. Root's processes are not limited   |

Time, memory, file size and open files are limited at every level, and nothing survives its program.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from dataclasses import dataclass

from strop.rewards.sandbox.limits import Limits, SandboxError

logger = logging.getLogger(__name__)
LEVELS = ("namespaces", "bubblewrap", "user", "limits")
PROBE = "import json, random, socket\nprint(sum(range(5)))"


@dataclass(frozen=True)
class Isolation:
    level: str
    why_not_better: str = ""
    """What kept the levels above from working."""

    @property
    def cuts_network(self) -> bool:
        return self.level in ("namespaces", "bubblewrap")

    @property
    def hides_files(self) -> bool:
        return self.level in ("namespaces", "bubblewrap")

    @property
    def own_user(self) -> bool:
        """Programs cannot harm processes and files of the user who trains."""
        return self.level != "limits"

    def __str__(self) -> str:
        parts = [
            "no network" if self.cuts_network else "the network is OPEN",
            "files hidden" if self.hides_files else "files readable" if self.own_user else "files of this user WRITABLE",
        ]
        return f"{self.level} ({', '.join(parts)}; time, memory and processes limited)"


def isolation(wanted: str = "auto") -> Isolation:
    """The best level that works here, or the one that is wanted; ValueError if that one does not work."""
    if wanted == "auto":
        return _best()
    if wanted not in LEVELS:
        raise ValueError(f"Unknown isolation {wanted!r}. Known: auto, {', '.join(LEVELS)}.")
    problem = why_not(wanted)
    if problem:
        raise ValueError(f"The sandbox level {wanted!r} does not work on this machine: {problem}. Choose auto, or repair it.")
    return Isolation(wanted)


@functools.cache
def _best() -> Isolation:
    problems: list[str] = []
    for level in LEVELS:
        problem = why_not(level)
        if not problem:
            found = Isolation(level, "; ".join(problems))
            if not found.cuts_network:
                logger.warning(
                    "Programs of the model run with weak isolation: %s. Better was not possible: %s.",
                    found,
                    found.why_not_better,
                )
            return found
        problems.append(f"{level}: {problem}")
    raise SandboxError(f"No sandbox works on this machine: {'; '.join(problems)}.")


@functools.cache
def why_not(level: str) -> str:
    """What goes wrong when a small program runs at this level; empty if nothing does."""
    from strop.rewards.sandbox.launch import run_tests

    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if level == "bubblewrap" and os.geteuid() == 0:
        return "root would stay root inside"
    if level == "user" and os.geteuid() != 0:
        return "only root can become another user"
    try:
        [outcome] = run_tests(PROBE, [{"stdin": ""}], Limits(seconds=20, total_seconds=20), level=level)
    except SandboxError as error:
        return str(error)
    return "" if outcome.stdout == "10\n" else f"a small program failed: {outcome.status}, {outcome.stderr.strip()[-300:]}"
