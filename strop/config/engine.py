"""Which rollout engine a configuration gets: the one it names, or the native one where that is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from strop.catalog import ENGINES

ELSEWHERE = ("python", "url")
"""Keys of rollout.engine_kwargs.<name> that say where the engine's library is, if not in this environment."""


def missing_library(rollout: Any) -> str | None:
    """The library that the engine needs and that is not to be had, or None."""
    library = ENGINES.entry(rollout.name).facts["library"]
    own = rollout.engine_kwargs.get(rollout.name) or {}
    if library is None or any(own.get(key) for key in ELSEWHERE) or importlib.util.find_spec(library) is not None:
        return None
    return str(library)


def engine_name(rollout: Any) -> str:
    """The engine that samples."""
    return "native" if missing_library(rollout) else str(rollout.name)


def replica_count(rollout: Any) -> int:
    """Engines on machines of their own; 0: the engine lives beside the trainer."""
    return rollout.nnodes * rollout.n_gpus_per_node // (rollout.tensor_model_parallel_size * rollout.data_parallel_size)


def holds_weights(rollout: Any) -> bool:
    """The engine has a copy of the weights, which every update must bring."""
    return rollout.nnodes > 0 or bool(ENGINES.entry(engine_name(rollout)).facts["own_weights"])


def prefill_tokens(asked: int | None, *, on_cpu: bool) -> int:
    """Prompt tokens that the native engine computes in one pass."""
    return asked if asked is not None else 8192 if on_cpu else 32768
