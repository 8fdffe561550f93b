"""Experts that the native engine records on a CUDA device, with and without CUDA graphs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import Completion, Request
from strop.rollout.native import NativeEngine
from tests.backends.replay_checks import chosen
from tests.models.tiny import tiny_model
from tests.rollout.test_native_experts import PROMPTS, SAMPLING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = [Request(prompt, n=5, seed=i, max_tokens=40) for i, prompt in enumerate(PROMPTS)]
SIZES = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8}


def num_recorded(engine: NativeEngine) -> int:
    assert engine._step_loop is not None
    return engine._step_loop.runner.num_recorded


@pytest.mark.parametrize("drafts", [False, True], ids=["steps", "drafts"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_cuda_graphs_record_experts_too(cache: str, drafts: bool) -> None:
    """As many steps are recorded as without experts, and the experts are those of eager steps."""
    model = tiny_model("qwen3_moe", **SIZES).cuda().to(torch.bfloat16)
    common = {"kv_cache_dtype": cache, "speculation": SpeculationConfig(enable=drafts, num_tokens=3)}
    engines = {
        "plain": NativeEngine(model, **common),  # type: ignore[arg-type]
        "graphs": NativeEngine(model, record_experts=True, **common),  # type: ignore[arg-type]
        "eager": NativeEngine(model, record_experts=True, enforce_eager=True, **common),  # type: ignore[arg-type]
    }
    found: dict[str, list[Completion]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts that ask the device cannot be recorded, and say so
        for name, engine in engines.items():
            found[name] = [one for group in engine.generate(REQUESTS, SAMPLING) for one in group]
    assert num_recorded(engines["graphs"]) == num_recorded(engines["plain"])
    same = []
    for number, (plain, graphs, eager) in enumerate(zip(*found.values(), strict=True)):
        assert plain.ids == graphs.ids == eager.ids
        assert graphs.experts is not None and eager.experts is not None
        assert np.array_equal(graphs.experts, eager.experts)
        expected = chosen(model, [*PROMPTS[number // 5], *graphs.ids])
        same.append(np.sort(graphs.experts, -1) == np.sort(expected, -1))
    # Attention of the engine rounds otherwise than a plain pass, and in 8 bits more.
    assert np.concatenate(same).mean() > (0.97 if cache == "auto" else 0.8)
