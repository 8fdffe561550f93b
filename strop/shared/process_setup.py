"""What a command says on the side: Strop's own notes and everybody's warnings, one line each, on stderr."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path


class ToStderr(logging.Handler):
    """Writes to what sys.stderr is at that moment: the live view of a run puts its own stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # the stream is closed or full; a note is not worth a run
            self.handleError(record)


class OneLine(logging.Formatter):
    """`strop: warning: ...`, in the form that errors have; other libraries are named."""

    def format(self, record: logging.LogRecord) -> str:
        room = record.name.partition(".")[0]
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{room}: {level}{record.getMessage()}"
        return text if not record.exc_info else f"{text}\n{self.formatException(record.exc_info)}"


def configure_logging() -> None:
    """Once per process: Strop from INFO on, others from WARNING on; STROP_DEBUG=1 lets transformers tell all
    it does."""
    root = logging.getLogger()
    if any(isinstance(handler, ToStderr) for handler in root.handlers):
        return
    handler = ToStderr()
    handler.setFormatter(OneLine())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("strop").setLevel(logging.INFO)
    if os.environ.get("STROP_DEBUG") != "1":
        # Both are read when the library is imported, which is later. Its progress bars and tables of loaded
        # weights are noise.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


# What a process of Strop does before anything large is imported.


KEEP_MS = 60_000
"""How long the allocator keeps freed memory before the system gets it back."""
_GLIBC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of malloc.h


def prepare_process() -> None:
    configure_logging()
    keep_freed_memory()
    use_huge_pages()


def keep_freed_memory() -> None:
    """Let memory that one step frees be there for the next.

    A training step frees and asks for the same gigabytes again and again. Memory that went back to the system
    in between has to be cleared and mapped anew: a tenth of a step on a CPU. Where torch brings mimalloc (its
    builds for Arm), it goes back after 10 ms; that is read when torch is imported. The allocator of glibc
    gives back what is free at the end of its memory, and blocks larger than a limit at once; here only those
    above 32 MiB, the largest limit that it takes. What the user has set stays.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", str(KEEP_MS))
    if any(name in os.environ for name in _GLIBC_SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, -1)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(setting: Path = HUGE_PAGES) -> None:
    """Let torch ask for pages of 2 MiB, where the system gives them to those who ask.

    Matrix products on a CPU read gigabytes of weights and activations. With pages of 4 KiB they wait for
    translations of addresses, and each page is mapped by an interrupt of its own. Where huge pages are given
    to all or to nobody, nothing is set; read when torch is imported; what the user has set stays.
    """
    try:
        given = setting.read_text()
    except OSError:  # another system, or a kernel without huge pages
        return
    if "[madvise]" in given:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
