"""The `megatron` groups. Types and limits are checked, so that existing files load, but no key has an effect:
there is no Megatron backend yet."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import FreeForm, inert

_MEGATRON = "the Megatron backend is not supported yet"


@dataclass(eq=False)
class MegatronConfig:
    """Parallel degrees and raw overrides of the Megatron backend."""

    tensor_model_parallel_size: int = inert(1, _MEGATRON, at_least=1)
    """Devices that split each weight matrix."""
    pipeline_model_parallel_size: int = inert(1, _MEGATRON, at_least=1)
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = inert(None, _MEGATRON, at_least=1)
    """Interleaved pipeline stages per device."""
    context_parallel_size: int = inert(1, _MEGATRON, at_least=1)
    """Devices that split each sequence."""
    expert_model_parallel_size: int = inert(1, _MEGATRON, at_least=1)
    """Devices that divide the experts."""
    expert_tensor_parallel_size: int | None = inert(None, _MEGATRON, at_least=1)
    """Devices that split each expert's matrices."""
    sequence_parallel: bool = inert(True, _MEGATRON)
    """Split activations along the sequence dimension."""
    use_distributed_optimizer: bool = inert(True, _MEGATRON)
    """Shard optimizer state (ZeRO-1)."""
    param_offload: bool = inert(False, _MEGATRON)
    """Offload weights to host memory."""
    grad_offload: bool = inert(False, _MEGATRON)
    """Offload gradients to host memory."""
    optimizer_offload: bool = inert(False, _MEGATRON)
    """Offload optimizer state to host memory."""
    use_dist_checkpointing: bool = inert(False, _MEGATRON)
    """Load initial weights from a Megatron checkpoint."""
    dist_checkpointing_path: str | None = inert(None, _MEGATRON)
    """Path of the Megatron checkpoint."""
    dist_checkpointing_prefix: str = inert("", _MEGATRON)
    """Prefix of names in the Megatron checkpoint."""
    seed: int = inert(42, _MEGATRON)
    """Seed of this model."""
    dtype: str = inert("bfloat16", _MEGATRON, choices=("bfloat16", "float16", "float32"))
    """Precision of forward and backward."""
    forward_only: bool = inert(False, _MEGATRON)
    """Never train this model."""
    use_remove_padding: bool = inert(True, _MEGATRON)
    """Pack sequences without padding tokens."""
    use_mbridge: bool = inert(True, _MEGATRON)
    """Convert Hugging Face weights on the fly."""
    vanilla_mbridge: bool = inert(True, _MEGATRON)
    """Variant of the weight conversion."""
    load_weight: bool = inert(True, _MEGATRON)
    """Load initial weights."""
    override_ddp_config: FreeForm = inert({}, _MEGATRON)
    """Raw data-parallel options."""
    override_mcore_model_config: FreeForm = inert({}, _MEGATRON)
    """Raw model options."""
    override_transformer_config: FreeForm = inert(
        {
            "recompute_granularity": None,
            "recompute_modules": ["core_attn"],
            "recompute_method": None,
            "recompute_num_layers": None,
            "attention_backend": "flash",
        },
        _MEGATRON,
    )
    """Raw transformer options."""
