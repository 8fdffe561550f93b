"""JSON that every reader takes: numbers it does not have become the texts "NaN", "Infinity" and "-Infinity"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Text of any value; what JSON has no form for appears as its `str`.

    >>> to_json({"loss": float("nan"), "path": ["é", 1]})
    '{"loss": "NaN", "path": ["é", 1]}'
    """
    text = json.dumps(_standard(value), indent=indent, ensure_ascii=False, default=str, allow_nan=False)
    # Half a surrogate pair, which byte-level tokenizers can leave, has no UTF-8.
    return text.encode("utf-8", "replace").decode()


def _standard(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _standard(value.item())
    return value
