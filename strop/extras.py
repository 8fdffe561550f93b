"""Optional libraries: imported when first used, with an error that names what to install."""

from __future__ import annotations

import importlib
import subprocess
from types import ModuleType


class MissingExtra(ImportError, ValueError):
    """An optional library is not installed."""


def require(module: str, *, extra: str, why: str) -> ModuleType:
    """Import `module`, or say which extra of this package brings it.

    >>> require("json", extra="none", why="it is always there").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{why} needs the package {module.partition('.')[0]!r}, which cannot be imported ({error}). "
            f"Install it with: pip install 'strop[{extra}]'"
        ) from error


def kernel_errors() -> tuple[type[Exception], ...]:
    """What compiling or launching a kernel raises where the GPU, the driver or the compiler does not fit.

    Exceptions that steer a program (the end of a recomputation in torch, a cancellation) are not among them.
    """
    expected: tuple[type[Exception], ...] = (
        RuntimeError,  # CUDA errors, out of memory, no C compiler, NotImplementedError
        OSError,  # a missing compiler or an unwritable kernel cache
        subprocess.SubprocessError,  # a compiler that failed
        ValueError,  # an unsupported shape or dtype
        TypeError,
        AttributeError,  # an operator that this torch or Triton does not have
        KeyError,
        AssertionError,
    )
    try:
        from triton.errors import TritonError
    except ImportError:
        return expected
    return (*expected, TritonError)
