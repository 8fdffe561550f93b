"""From a Hugging Face configuration to megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from strop.backends.megatron.library import megatron
from strop.backends.megatron.topology import Sizes
from strop.config.megatron import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def padded_vocabulary(config: PreTrainedConfig, sizes: Sizes) -> int:
    """Rows of the embedding: every tensor-parallel rank has equally many."""
    return -(-int(config.vocab_size) // sizes.tensor) * sizes.tensor


def head_size(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def transformer_config(
    config: PreTrainedConfig,
    sizes: Sizes,
    *,
    dtype: torch.dtype,
    wide_residual: bool,
    on_gpu: bool,
    **given: Any,
) -> Any:
    """The TransformerConfig; `given` are further fields of it, by name."""
    family = FAMILIES[str(config.model_type)]
    lengths_vary = sizes.pipeline > 1 and sizes.virtual == 1
    fields: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_size(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": torch.float32 if wide_residual else dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "fp32_residual_connection": wide_residual,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if sizes.virtual > 1 else None,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": 1,
        # Rows of different micro-batches have different lengths, and stages exchange shapes. Two stages with
        # virtual ones would mix up messages in both directions, so there rows are padded to one length.
        "variable_seq_lengths": lengths_vary,
        # Where nothing is sent, allgather copies each token once less; it does not know different lengths.
        "moe_token_dispatcher_type": "alltoall" if sizes.expert > 1 or lengths_vary else "allgather",
        # The loss of a micro-batch has its denominator inside: the schedule must not divide it.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,
        "batch_p2p_comm": on_gpu and sizes.virtual == 1,
    }
    # Kernels of Apex and Transformer Engine, which need not be installed.
    for name in ("gradient_accumulation_fusion", "bias_activation_fusion", "masked_softmax_fusion"):
        fields[name] = False
    for name in ("bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"):
        fields[name] = False
    if family.experts:
        fields |= _expert_fields(config)
    return megatron("transformer").TransformerConfig(**{**fields, **given})


def _expert_fields(config: PreTrainedConfig) -> dict[str, Any]:
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    fields = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Probabilities of the chosen experts: the softmax of all, normed if the model says so.
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_grouped_gemm": False,
    }
    if FAMILIES[str(config.model_type)].latent:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": width * config.n_shared_experts,
        }
        if config.n_group > 1:
            fields |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return fields
