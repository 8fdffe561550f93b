"""Random models of a few thousand weights whose layers are not causal attention alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.tiny import SIZE

EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
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

STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **EXPERTS},
    "qwen3_next": {"layer_types": _MIXED, **EXPERTS, **_DELTA},
    "qwen3_5_text": {"layer_types": _MIXED, **_DELTA},
    "kimi_linear": {
        "layer_types": _MIXED,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        **EXPERTS,
        **LATENT,
    },
    "falcon_h1": {"mamba_d_ssm": 64, **_MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16, **_MAMBA},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mamba": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4},
}
"""Models with states: packed and sampled by the native engine."""
OTHERS: dict[str, dict[str, Any]] = {
    "minimax": {"layer_types": _MIXED, "block_size": 8, **EXPERTS},
    "deepseek_v32": {**EXPERTS, **LATENT, **_INDEXER},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "bloom": {"n_head": 4, "n_layer": 2},
}


def hybrid(family: str) -> Any:
    """Weights are larger than usual, so that tokens change each other's log-probs. Those of Mamba are not as
    large: nothing normalises what its states are made of, and roundings grow with its numbers."""
    changes = {**STATEFUL, **OTHERS}[family]
    config = AutoConfig.for_model(family, **{**SIZE, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4 if family == "mamba" else 8)
    return model
