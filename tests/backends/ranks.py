"""Tests that run as several ranks: a file of tests is started once per rank, and every rank goes through all of them."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strop.backends.fsdp import FsdpBackend
from strop.ranks import Ranks
from strop.runtime.local import is_rank, joined


@functools.cache
def here() -> Ranks:
    """This process as one of the ranks it was started with."""
    import os

    group = joined(int(os.environ["WORLD_SIZE"]), torch.device("cpu"), timeout=60)
    group_of_process.append(group)  # it lasts as long as the process
    return group.__enter__()


group_of_process: list[Any] = []


def maker() -> dict[str, Callable[..., Any]] | None:
    """The sharding backend, where this process is a rank."""
    return {"fsdp": functools.partial(FsdpBackend, ranks=here())} if is_rank() else None


START = """
import sys
from strop.runtime.local import launch
sys.exit(launch([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]], int(sys.argv[1])))
"""


def pytest_as_ranks(world: int, arguments: Sequence[str], timeout: float = 300) -> str:
    """Run tests once per rank; what they printed, when all of them pass."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(world), *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout
