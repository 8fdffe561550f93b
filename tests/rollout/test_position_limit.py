"""How many positions a model takes, where its rotary embedding extends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.rollout.base import Request, Sampling, build_engine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.position_limit import position_limit
from tests.rollout import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 1.5, 2.0, 2.5],
}


def config(rotary: dict[str, Any], positions: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.3,
        rope_parameters={"rope_theta": 10_000.0, **rotary},
    )


@pytest.mark.parametrize(
    ("rotary", "positions", "limit"),
    [({"rope_type": "default"}, 48, 48), (YARN, 32, 128), (YARN, 128, 128), (LONGROPE, 128, 64)],
)
def test_the_limit_follows_the_rotary_embedding(rotary: dict[str, Any], positions: int, limit: int) -> None:
    assert position_limit(config(rotary, positions)) == limit


def test_yarn_is_sampled_right_beyond_the_length_of_the_model_before_it() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(YARN, 32)).eval()
    engine = build_engine("native", model, max_model_len=100)
    prompts = [[7, 3] * 40, [5]]
    for prompt, (answer,) in zip(
        prompts, engine.generate([Request(p) for p in prompts], Sampling(max_tokens=15))
    ):
        tiny.assert_log_probs(model, prompt, answer.ids, answer.log_probs, 1.0)


def test_longrope_is_not_sampled_where_one_sequence_would_change_the_others() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(LONGROPE, 128)).eval()
    with pytest.raises(ValueError, match="from 2 to 64 positions"):
        NativeEngine(model, max_model_len=80)
    prompts = [[7, 3] * 40, [5, 9, 2]]
    (long,), (short,) = NativeEngine(model).generate([Request(p) for p in prompts], Sampling(max_tokens=15))
    assert long.finish == "error" and "max_model_len=64" in str(long.error)
    tiny.assert_log_probs(model, prompts[1], short.ids, short.log_probs, 1.0)
