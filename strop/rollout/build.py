"""A rollout engine by its name."""

from __future__ import annotations

from typing import Any

from strop.catalog import ENGINES
from strop.registry import did_you_mean
from strop.rollout.base import Engine


def build_engine(name: str, model: Any, **settings: Any) -> Engine:
    """The engine `name` over a Hugging Face module.

    None stands for the engine's default, and a setting that only other engines know is left out. `engine_kwargs` has the
    arguments of each engine's own library under its name.
    """
    takes = ENGINES.entry(name).facts["settings"]
    known = {key for other in ENGINES.names() for key in ENGINES.entry(other).facts["settings"]}
    for key in settings:
        if key not in known:
            raise ValueError(f"No rollout engine has a setting {key!r}.{did_you_mean(key, known)}")
    if settings.get("engine_kwargs") is not None:
        settings["engine_kwargs"] = settings["engine_kwargs"].get(name)
    engine: Engine = ENGINES.get(name)(model, **{k: v for k, v in settings.items() if k in takes and v is not None})
    return engine
