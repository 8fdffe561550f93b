"""The `megatron` groups. They compose and are checked, so that people's files load; the backend itself is not there yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.config.schema.fields import setting


@dataclass(eq=False)
class Megatron:
    """Parallel degrees and raw overrides of the Megatron backend. Read by backends/megatron.py."""

    tensor_model_parallel_size: int = setting(1, at_least=1)
    """Devices that share each weight matrix."""
    pipeline_model_parallel_size: int = setting(1, at_least=1)
    """Stages of the pipeline."""
    virtual_pipeline_model_parallel_size: int | None = setting(None, at_least=1)
    """Interleaved stages per device."""
    context_parallel_size: int = setting(1, at_least=1)
    """Devices that share one sequence."""
    expert_model_parallel_size: int = setting(1, at_least=1)
    """Devices that share the experts."""
    expert_tensor_parallel_size: int | None = setting(None, at_least=1)
    """Devices that share each expert's matrices."""
    sequence_parallel: bool = True
    """Split activations along the sequence too."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state (ZeRO-1)."""
    param_offload: bool = False
    """Park weights in host memory."""
    grad_offload: bool = False
    """Park gradients in host memory."""
    optimizer_offload: bool = False
    """Park optimizer state in host memory."""
    use_dist_checkpointing: bool = False
    """Start from a Megatron checkpoint."""
    dist_checkpointing_path: str | None = None
    """Its path."""
    dist_checkpointing_prefix: str = ""
    """Prefix of names in it."""
    seed: int = 42
    """Seed of this model."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"))
    """Precision of forward and backward."""
    forward_only: bool = False
    """Never train this model."""
    use_remove_padding: bool = True
    """Pack sequences."""
    use_mbridge: bool = True
    """Convert Hugging Face weights on the fly."""
    vanilla_mbridge: bool = True
    """Variant of that conversion."""
    load_weight: bool = True
    """Load initial weights."""
    override_ddp_config: dict[str, Any] = setting({})
    """Raw data-parallel options."""
    override_mcore_model_config: dict[str, Any] = setting({})
    """Raw model options."""
    override_transformer_config: dict[str, Any] = setting(
        {
            "recompute_granularity": None,
            "recompute_modules": ["core_attn"],
            "recompute_method": None,
            "recompute_num_layers": None,
            "attention_backend": "flash",
        }
    )
    """Raw transformer options."""
