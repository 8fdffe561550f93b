"""Random models of a few thousand weights, one per family, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.types import Batch

SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.3},
    "granite": {"logits_scaling": 4.0, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
"""Families that not every test of families goes through."""


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    config = AutoConfig.for_model(family, **{**SIZE, **(FAMILIES | OTHERS)[family], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # random weights are too small for differences between tokens to show
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model.eval()


def tiny_batch(lengths: list[tuple[int, int]] | None = None, seed: int = 0, vocabulary: int = 61) -> Batch:
    """Sequences of (prompt, response) tokens; the last response token of each second row is not trained."""
    lengths = lengths or [(3, 5), (7, 2), (1, 9), (4, 1), (12, 6)]
    generator = torch.Generator().manual_seed(seed)
    width = max(response for _, response in lengths)
    mask = torch.zeros(len(lengths), width)
    for row, (_, response) in enumerate(lengths):
        mask[row, : response - row % 2 if response > 1 else response] = 1
    return Batch(
        sequences=[torch.randint(3, vocabulary, (p + r,), generator=generator) for p, r in lengths],
        prompt_lengths=torch.tensor([p for p, _ in lengths]),
        mask=mask,
        advantages=torch.randn(len(lengths), width, generator=generator),
        row_ids=torch.arange(len(lengths)),
    )
