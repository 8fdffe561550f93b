"""Fields of megatron-core's TransformerConfig that the user chooses."""

from __future__ import annotations

from typing import Any

from strop.config.schema.megatron import MegatronConfig
from strop.models.checkpointing import checkpointing_mode

_NOT_OURS = ("attention_backend",)
"""Options of Transformer Engine's attention, which is not used."""


def transformer_options(module: Any, settings: MegatronConfig) -> dict[str, Any]:
    """Recomputation as the module (model.enable_gradient_checkpointing) or override_transformer_config says,
    and all other overrides."""
    given = {**settings.override_mcore_model_config, **settings.override_transformer_config}
    options = {key: value for key, value in given.items() if key not in _NOT_OURS}
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
    return options
