"""Optional libraries: imported when first used, with an error that names what to install."""

from __future__ import annotations

import importlib
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
