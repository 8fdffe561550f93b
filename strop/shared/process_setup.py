"""Setup of every process of Strop, before torch is imported: logging to stderr, one line per record, and
settings of the memory allocator; and the garbage collection of training loops."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ToStderr(logging.Handler):
    """Writes to the current sys.stderr, which the live view of a run replaces by its own stream."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # the stream is closed, or its disk is full: the run goes on
            self.handleError(record)


class OneLine(logging.Formatter):
    """`strop: warning: ...`, the form of error messages; records of other libraries begin with their name."""

    def format(self, record: logging.LogRecord) -> str:
        package = record.name.partition(".")[0]
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{package}: {level}{record.getMessage()}"
        return text if not record.exc_info else f"{text}\n{self.formatException(record.exc_info)}"


def configure_logging() -> None:
    """Set up logging, once per process: Strop from INFO on, other libraries from WARNING on. With
    STROP_DEBUG=1, transformers keeps its own verbosity."""
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


KEEP_MS = 60_000
"""How long the allocator keeps freed memory before the system gets it back."""
_GLIBC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of malloc.h


def prepare_process() -> None:
    configure_logging()
    # On Arm, every process would leave /tmp/perf-PID.map, in which oneDNN lists its kernels for a profiler.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    keep_freed_memory()
    use_huge_pages()


def keep_freed_memory() -> None:
    """Keep memory that a step frees for the next step.

    A training step frees gigabytes and allocates them again. Memory that was returned to the system in
    between must be cleared and mapped again, which takes a tenth of a step on a CPU. mimalloc, which torch
    uses in its builds for Arm, returns memory after 10 ms; it reads its settings when torch is imported.
    glibc returns free memory at the end of its heap, and every block above a limit at once; here the limit is
    32 MiB, the largest that it accepts. Settings of the user are kept.
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
    """Let torch ask for pages of 2 MiB, if the system gives them on request (madvise).

    Matrix products on a CPU read gigabytes of weights and activations. With pages of 4 KiB they wait for
    address translation, and every page costs a page fault. Nothing is set where the system gives huge pages
    always or never. torch reads the setting when it is imported. A setting of the user is kept.
    """
    try:
        given = setting.read_text()
    except OSError:  # another system, or a kernel without huge pages
        return
    if "[madvise]" in given:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def long_lived_objects_frozen() -> Iterator[None]:
    """On a GPU, garbage collections inside the block leave out all objects that exist at its beginning.

    The modules of torch and transformers and the model are 350,000 objects. A full collection goes through
    them in 0.3 s, during which no thread runs, the engine's included; a rollout with agents causes one or
    two.
    """
    import torch

    # A step on a CPU is longer than a collection. What is frozen already belongs to the caller.
    if not torch.cuda.is_initialized() or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
