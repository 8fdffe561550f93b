"""What a process of Strop does before anything large is imported."""

from __future__ import annotations

import os

from strop.trainer.logs import configure_logging

KEEP_MS = 60_000
"""How long the allocator keeps freed memory before the system gets it back."""


def prepare_process() -> None:
    configure_logging()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let memory that one step frees be there for the next.

    A training step frees and asks for the same gigabytes again and again. Where torch brings mimalloc (its builds for Arm),
    freed memory goes back to the system after 10 ms, and every page of it has to be cleared and mapped anew: a tenth of a step
    on a CPU. Read when torch is imported; what the user has set stays.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", str(KEEP_MS))
