"""Fields of megatron-core's TransformerConfig that the user chooses."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from strop.backends.megatron.library import megatron
from strop.config.schema.megatron import MegatronConfig
from strop.models.checkpointing import checkpointing_mode
from strop.registry import did_you_mean

log = logging.getLogger(__name__)

KERNELS = (
    "attention_backend",
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion",
    "deallocate_pipeline_outputs",
    "persist_layer_norm",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "moe_shared_expert_overlap",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "use_cpu_initialization",
)
"""Options that choose kernels and ways to communicate. They change no result, and most of them need
Transformer Engine or Apex; this backend makes the choice itself."""


def transformer_options(module: Any, settings: MegatronConfig) -> dict[str, Any]:
    """Recomputation as the module (model.enable_gradient_checkpointing) or override_transformer_config says,
    and all other overrides."""
    ignored = sorted(settings.override_transformer_config.keys() & set(KERNELS) - {"attention_backend"})
    if ignored:
        log.warning("override_transformer_config: %s have no effect here.", ", ".join(ignored))
    given = {**settings.override_mcore_model_config, **settings.override_transformer_config}
    options = {key: value for key, value in given.items() if key not in KERNELS}
    if options.get("recompute_granularity") is None:
        for key in [key for key in options if key.startswith("recompute_")]:
            del options[key]
        mode = checkpointing_mode(module)
        if mode == "full":
            options |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        elif mode == "selective":
            options |= {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    for name, problem in unknown_options(settings):
        raise ValueError(f"override_transformer_config.{name} {problem}")
    return options


def unknown_options(settings: MegatronConfig) -> list[tuple[str, str]]:
    """Names in override_transformer_config that megatron-core does not have, each with what is wrong."""
    known = {field.name for field in dataclasses.fields(megatron("transformer").TransformerConfig)}
    found = []
    for name in {**settings.override_mcore_model_config, **settings.override_transformer_config}:
        if name not in known and name not in KERNELS:
            found.append(
                (name, f"is no field of megatron-core's TransformerConfig.{did_you_mean(name, known)}")
            )
    return found
