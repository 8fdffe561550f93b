"""Architectures whose layers mix tokens in other ways than causal attention: never packed, never sampled by
the native engine, and trained with the log-probs of a plain forward pass."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.attention import padded_attention
from strop.models.forward import response_outputs
from strop.models.layouts import check
from strop.models.layouts.check import packing_obstacle, runs_packed
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from strop.types import Batch
from tests.models.tiny import SIZE, tiny_batch

_EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MIXED = ["linear_attention", "full_attention"]
# With few heads many scores of the indexer are exactly 0, and which of them are the largest is open.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4, "first_k_dense_replace": 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    "qwen3_next": {"layer_types": _MIXED, **_EXPERTS, **_DELTA},
    "qwen3_5_text": {"layer_types": _MIXED, **_DELTA},
    "kimi_linear": {
        "layer_types": _MIXED,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        **_EXPERTS,
        **_LATENT,
    },
    "minimax": {"layer_types": _MIXED, "block_size": 8, **_EXPERTS},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, **_MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16, **_MAMBA},
    "deepseek_v32": {**_EXPERTS, **_LATENT, **_INDEXER},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "bloom": {"n_head": 4, "n_layer": 2},
}
SAMPLED = {"gpt_oss"}
"""Those that the native engine samples from."""


def build(family: str) -> Any:
    config = AutoConfig.for_model(family, **{**SIZE, **ARCHITECTURES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return model


def plain_log_probs(model: Any, batch: Batch) -> Tensor:
    """One sequence at a time, as transformers computes it."""
    found = torch.zeros(batch.mask.shape)
    for row, (ids, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1].float()
        picked = logits.log_softmax(-1).gather(-1, ids[prompt:, None])[:, 0]
        found[row, : len(picked)] = picked
    return found


@pytest.mark.parametrize("family", ARCHITECTURES)
@torch.no_grad()
def test_it_trains_on_the_log_probs_of_each_sequence_alone_and_is_not_sampled_wrongly(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    check._log_padded.cache_clear()
    model = build(family)
    batch = tiny_batch()
    expected = plain_log_probs(model, batch)
    with caplog.at_level(logging.INFO, "strop"):
        found = response_outputs(model, batch, ["log_probs"])["log_probs"]
        response_outputs(model, batch, ["log_probs"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    obstacle = packing_obstacle(model)
    assert obstacle is not None
    assert caplog.text.count("runs with padded rows") == 1 and obstacle in caplog.text
    assert f"attn_implementation={padded_attention(model)}" in caplog.text
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1"):
        runs_packed(model, True, sequence_parallel=True)
    engine = NativeEngine(model)
    if family in SAMPLED:
        assert len(engine.generate([Request([1, 5, 7])], Sampling(max_tokens=2))[0]) == 1
        return
    with pytest.raises(ValueError, match=r"rollout\.name=hf"):
        engine.generate([Request([1, 5, 7])], Sampling(max_tokens=2))


def test_sinks_need_no_settings() -> None:
    """gpt-oss: padded rows and eager attention are chosen without being asked for."""
    model = build("gpt_oss")
    assert "sinks" in (packing_obstacle(model) or "") and padded_attention(model) == "eager"


def test_a_mask_of_ones_own_is_refused() -> None:
    """Doge selects keys by its values, which no configuration shows, and which later tokens change."""
    config = AutoConfig.for_model("doge", **SIZE)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"cannot be trained.*later tokens change log-probs .* by up to"):
        response_outputs(model, tiny_batch(), ["log_probs"])
    with pytest.raises(ValueError, match=r"rule of its own.*rollout\.name=hf"):
        NativeEngine(model).generate([Request([1, 5, 7])], Sampling(max_tokens=2))


@torch.no_grad()
def test_a_model_that_does_not_pass_the_borders_on_runs_padded() -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **SIZE)).eval()
    found = response_outputs(model, tiny_batch(), ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, plain_log_probs(model, tiny_batch()), atol=1e-5, rtol=1e-5)
    assert "borders of packed sequences" in (packing_obstacle(model) or "")


@pytest.mark.parametrize("change", [{}, {"final": 0.5}], ids=["scaled", "scaled_and_capped"])
@torch.no_grad()
def test_what_a_model_does_to_states_before_its_head_is_done_once(change: dict[str, float]) -> None:
    """MiniCPM3 divides the last hidden states before the head."""
    sizes = {**SIZE, **_LATENT, "dim_model_base": 8}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("minicpm3", **sizes)).eval()
    model.lm_head.weight.mul_(20)
    if change:
        cap_logits(model, change["final"])
    batch = tiny_batch()
    expected = plain_log_probs(model, batch)
    found = response_outputs(model, batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def cap_logits(model: Any, cap: float) -> None:
    """The model's logits become cap tanh(logits / cap)."""
    own = model.forward

    def forward(*given: Any, **options: Any) -> Any:
        output = own(*given, **options)
        output.logits = cap * torch.tanh(output.logits / cap)
        return output

    model.forward = forward
