"""Weights of tiny models as megatron-core stores them, made of Hugging Face weights by hand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PADDED = 64
"""Rows of the vocabulary; the tiny models have 61."""


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def stacked(model) -> dict[str, Tensor]:
    """A checkpoint of a dense model: weights of all layers in one tensor each."""
    config = model.config
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    inside = ["input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_qkv.weight"]
    inside += ["self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    if config.model_type == "qwen2":
        inside.append("self_attention.linear_qkv.bias")
    found = {}
    for name in inside:
        layers = [
            whole_of(f"decoder.layers.{number}.{name}", weights, 0, config)
            for number in range(config.num_hidden_layers)
        ]
        found[f"decoder.layers.{name}"] = torch.stack(layers)
    outside = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    if not config.tie_word_embeddings:
        outside.append("output_layer.weight")
    return found | {name: whole_of(name, weights, 0, config) for name in outside}


def whole_of(name: str, weights: dict[str, Tensor], first: int, config) -> Tensor:
    """The tensor of one rank, made of Hugging Face weights by Megatron's documentation: each group of heads
    has its queries, its key, its value."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        source = "model.embed_tokens.weight" if name[0] == "e" else "lm_head.weight"
        table = weights.get(source, weights["model.embed_tokens.weight"])
        return F.pad(table, (0, 0, 0, PADDED - len(table)))
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    _, _, number, rest = name.split(".", 3)
    prefix = f"model.layers.{int(number) + first}."
    last = name.rpartition(".")[2]
    if "linear_qkv" in rest:
        groups = config.num_key_value_heads
        parts = [weights[f"{prefix}self_attn.{part}_proj.{last}"] for part in "qkv"]
        return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)
    if "local_experts" in rest:
        expert = int(rest.split(".")[3])
        kind = "gate_up_proj" if "fc1" in rest else "down_proj"
        return weights[f"{prefix}mlp.experts.{kind}"][expert]
    if "linear_fc1" in rest:
        owner = rest.removesuffix(".linear_fc1.weight")
        gate, up = (weights[f"{prefix}{owner}.{part}_proj.weight"] for part in ("gate", "up"))
        return torch.cat([gate, up])
    plain = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    }
    if config.model_type == "deepseek_v3":
        plain["self_attention.q_layernorm.weight"] = "self_attn.q_a_layernorm.weight"
    return weights[prefix + plain[rest]]
