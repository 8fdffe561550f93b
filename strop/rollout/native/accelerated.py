"""Whether this device has the Triton kernels; without them plain torch computes the same."""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

from strop.extras import MissingExtra, require


@cache
def kernels(device: str) -> ModuleType | None:
    """The kernels for a kind of device ("cuda", "cpu" ...), or None."""
    if device != "cuda":
        return None
    try:
        return require("strop.rollout.native.kernels", extra="gpu", why="Fast decoding on a GPU")
    except MissingExtra as error:
        warnings.warn(f"{error} Decoding falls back to plain torch, several times slower.", stacklevel=2)
        return None
