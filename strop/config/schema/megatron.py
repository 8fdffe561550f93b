"""The `megatron` groups: how strategy=megatron divides a model."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import FreeForm, inert, setting

_TABLES = "weights are read from and written to Hugging Face folders by Strop's own tables"


@dataclass(eq=False)
class MegatronConfig:
    """Parallel degrees and raw overrides of the Megatron backend."""

    tensor_model_parallel_size: int = setting(1, at_least=1)
    """Devices that split each weight matrix."""
    pipeline_model_parallel_size: int = setting(1, at_least=1)
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = setting(None, at_least=1)
    """Interleaved pipeline stages per device."""
    context_parallel_size: int = setting(1, at_least=1)
    """Devices that split each sequence."""
    expert_model_parallel_size: int = setting(1, at_least=1)
    """Devices that share the experts of a layer."""
    expert_tensor_parallel_size: int | None = setting(None, at_least=1)
    """Devices that split each expert's matrices."""
    sequence_parallel: bool = setting(True)
    """Tensor-parallel devices also split the tokens between the split matrices."""
    use_distributed_optimizer: bool = setting(True)
    """Shard optimizer state (ZeRO-1)."""
    param_offload: bool = setting(False)
    """Offload weights to host memory."""
    grad_offload: bool = inert(False, "gradients exist from a pass to the next update, on the device")
    """Offload gradients to host memory."""
    optimizer_offload: bool = setting(False)
    """Offload optimizer state to host memory."""
    use_dist_checkpointing: bool = setting(False)
    """Load initial weights from the Megatron checkpoint dist_checkpointing_path. model.path has the
    configuration and the tokenizer."""
    dist_checkpointing_path: str | None = setting(None)
    """Folder of a Megatron checkpoint (torch_dist), or a folder of verl with a dist_ckpt in it."""
    dist_checkpointing_prefix: str = setting("")
    """Prefix of names in the Megatron checkpoint."""
    seed: int = inert(42, "weights are loaded, and there is no dropout")
    """Seed of this model."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"))
    """Precision of forward and backward."""
    forward_only: bool = inert(False, "the role says whether a model is trained")
    """Never train this model."""
    use_remove_padding: bool = inert(True, "sequences are always packed")
    """Pack sequences without padding tokens."""
    use_mbridge: bool = inert(True, _TABLES)
    """Convert Hugging Face weights on the fly."""
    vanilla_mbridge: bool = inert(True, _TABLES)
    """Variant of the weight conversion."""
    load_weight: bool = setting(True)
    """Load initial weights."""
    override_ddp_config: FreeForm = inert({}, "gradients are summed over ranks once per batch, in float32")
    """Raw data-parallel options."""
    override_mcore_model_config: FreeForm = setting({})
    """Raw model options."""
    override_transformer_config: FreeForm = setting(
        {
            "recompute_granularity": None,
            "recompute_modules": ["core_attn"],
            "recompute_method": None,
            "recompute_num_layers": None,
            "attention_backend": "flash",
        }
    )
    """Raw transformer options."""
