"""From the `model` section of a configuration to a module: policy, reference, critic or reward model."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from strop.config.checkpointing import checkpointing_of
from strop.config.schema.model import ModelConfig
from strop.models.checkpointing import checkpoint_activations
from strop.models.files.names import name_in_files
from strop.models.files.weights import open_weights, weight_files
from strop.models.generation.settings import load_generation_config, read_generation_config
from strop.models.heads import empty_scalar_model, load_scalar_model, note_own_head, untie_own_head
from strop.models.layouts.check import runs_packed
from strop.models.load import (
    WeightFiles,
    language_model_class,
    load_config,
    load_language_model,
    load_tokenizer,
    resolve,
)
from strop.models.lora import adapted_layers, add_adapters, base_model, decoder_of, load_adapters
from strop.models.nf4.layers import quantize_layers
from strop.models.patches import MODEL_PATCHES, PatchContext, apply_patches, choose_patches
from strop.models.vision.passes import freeze_tower
from strop.registry import load_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a precision in the configuration."""
    if name not in DTYPES:
        raise ValueError(f"Unknown precision {name!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def has_bf16_instructions() -> bool:
    """Whether this CPU multiplies bf16 in hardware. oneDNN also supports bf16 where AVX-512 has to emulate
    it, at a fraction of the speed of fp32."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return True


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision to compute in: `name`, except that a CPU without bf16 instructions, where bf16 is
    hundreds of times slower than fp32, computes in fp32."""
    wanted = dtype_of(name)
    if device.type == "cpu" and wanted != torch.float32 and not has_bf16_instructions():
        _warn_fp32(name)
        return torch.float32
    return wanted


@cache
def _warn_fp32(name: str) -> None:
    """Once, although every role asks for its precision."""
    log.warning("This CPU has no bf16 instructions; computing in fp32 instead of %s.", name)


def build_policy(
    settings: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    weights: bool = True,
    freeze_vision_tower: bool = False,
    quantize_on: torch.device | None = None,
) -> Any:
    """The language model in training, on the CPU, weights in `dtype`; with adapters when lora_rank says so.

    Without `weights`, here and below, its parameters are on the meta device. `quantize_on`, here and below:
    the device that computes 4-bit weights.
    """
    if settings.quantization is None:
        model = _finish(_language_model(settings, dtype, weights), settings, weights)
    else:
        _check_quantized(settings, weights)
        model = _language_model(settings, stored_dtype(settings))
        model = _finish(_quantized(model, dtype, quantize_on), settings)
    if freeze_vision_tower:
        freeze_tower(model)
    return model


def adopt_policy(model: PreTrainedModel, settings: ModelConfig) -> Any:
    """The same of a module that the caller has loaded. It is changed in place; `undo_patches` restores it."""
    if settings.quantization is not None:
        raise ValueError(
            f"model.quantization={settings.quantization} with a module: the weights of its owner would be "
            "lost. Save it (save_pretrained) and give the folder, or leave model.quantization out."
        )
    return _finish(_prepare(model, settings), settings)


def build_reference(
    settings: ModelConfig, *, dtype: torch.dtype = torch.float32, weights: bool = True
) -> Any:
    """The same model without adapters, frozen."""
    return _language_model(settings, dtype, weights).requires_grad_(False).eval()


def build_critic(
    settings: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    weights: bool = True,
    quantize_on: torch.device | None = None,
) -> Any:
    """A value model; a path without a scalar head (a language model) gets a new one."""
    if settings.quantization is not None:
        _check_quantized(settings, weights)
        model = _scalar_model(settings, stored_dtype(settings), new_head=True)
        return _finish(_quantized(model, dtype, quantize_on), settings)
    return _finish(_scalar_model(settings, dtype, new_head=True, weights=weights), settings, weights)


def build_reward_model(
    settings: ModelConfig, *, dtype: torch.dtype = torch.float32, weights: bool = True
) -> Any:
    """A frozen reward model; its folder must hold the scalar head. Adapters are merged into its weights."""
    model = _scalar_model(settings, dtype, new_head=False, weights=weights)
    if settings.lora_adapter_path and weights:
        adapted = load_adapters(model, settings.lora_adapter_path, only_lora=False)
        model = adapted.merge_and_unload()
    return model.requires_grad_(False).eval()


def build_tokenizer(settings: ModelConfig, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of tokenizer_path, or of the model itself, with custom_chat_template if it is set."""
    _import_libraries(settings)
    return load_tokenizer(
        settings.tokenizer_path or settings.path,
        trust_remote_code=settings.trust_remote_code,
        chat_template=settings.custom_chat_template,
        local_files_only=local_files_only,
    )


def attention_of(settings: ModelConfig) -> str | None:
    """The attention function of the padded layout that override_config names, if any. flash_attention_2 is
    the choice of many commands, and few machines need it: without it the default is used."""
    chosen = settings.override_config.get("attn_implementation")
    if chosen is None or (chosen == "flash_attention_2" and not _has_flash_attention()):
        return None
    return str(chosen)


@cache
def _has_flash_attention() -> bool:
    """Whether transformers can use the package flash-attn here; a warning says so if not, once."""
    from transformers.utils import is_flash_attn_2_available

    found = bool(is_flash_attn_2_available())
    if not found:
        log.warning(
            "attn_implementation=flash_attention_2 has no effect: flash-attn is not installed, or there is "
            "no GPU for it. Packed rows (use_remove_padding=true) do not need it."
        )
    return found


def stored_dtype(settings: ModelConfig) -> torch.dtype:
    """The precision of the weights on the disk, as config.json says; fp32 where it does not."""
    found = getattr(_config(settings), "dtype", None)
    if isinstance(found, torch.dtype):
        return found
    return torch.float32


def _language_model(settings: ModelConfig, dtype: torch.dtype, weights: bool = True) -> PreTrainedModel:
    _import_libraries(settings)
    source = resolve(settings.path)
    config = language_config(settings)
    generation = read_generation_config(source.name)  # damage is said before weights are read
    if not weights:
        with meta_init():
            model = language_model_class(config).from_config(
                config, dtype=dtype, trust_remote_code=settings.trust_remote_code
            )
        load_buffers(model, source)
        load_generation_config(model, generation)
        return _prepare(model, settings)
    model = load_language_model(source, config, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    note_own_head(model)
    return _prepare(model, settings)


def _scalar_model(
    settings: ModelConfig, dtype: torch.dtype, *, new_head: bool, weights: bool = True
) -> PreTrainedModel:
    _import_libraries(settings)
    source = resolve(settings.path)
    if not weights:
        with meta_init():
            model = empty_scalar_model(_config(settings))
            nn.Module.to(model, dtype)
        load_buffers(model, source)
        return _prepare(model, settings)
    model = load_scalar_model(
        source.name,
        _config(settings),
        head_name=settings.value_head_prefix,
        new_head=new_head,
        dtype=dtype,
        **source.weight_arguments,
    )
    return _prepare(model, settings)


def language_config(settings: ModelConfig) -> PreTrainedConfig:
    """The configuration of the policy: config.json with override_config, corrected where the files have an
    output head of their own."""
    config = _config(settings)
    untie_own_head(config, resolve(settings.path))
    return config


def _config(settings: ModelConfig) -> PreTrainedConfig:
    return load_config(
        resolve(settings.path),
        override=settings.override_config,
        config_path=settings.hf_config_path,
        trust_remote_code=settings.trust_remote_code,
    )


def _import_libraries(settings: ModelConfig) -> None:
    for name in (settings.external_lib or "").split(","):
        if name.strip():
            load_module(name.strip())


def _prepare(model: PreTrainedModel, settings: ModelConfig) -> PreTrainedModel:
    choose_patches(model, settings.patches)
    context = PatchContext(
        attention=attention_of(settings),
        fp32_residual=settings.fp32_residual,
        use_liger=settings.use_liger,
    )
    apply_patches(model, MODEL_PATCHES, context)
    runs_packed(model, settings.use_remove_padding)  # says at the start where it does not
    return model


def _finish(model: PreTrainedModel, settings: ModelConfig, weights: bool = True) -> PreTrainedModel:
    if weights:
        model = _with_adapters(model, settings)
    else:
        with meta_init():
            model = _with_adapters(model, settings)
    checkpoint_activations(model, checkpointing_of(settings))
    return model


def _check_quantized(settings: ModelConfig, weights: bool) -> None:
    """Refuse 4-bit weights where they would be trained or sharded; the rules of the configuration say it
    earlier."""
    if not (settings.lora_rank or settings.lora_adapter_path):
        raise ValueError(
            f"model.quantization={settings.quantization} without LoRA: 4-bit weights are frozen. Set "
            "model.lora_rank (for instance 32) or model.lora_adapter_path, or leave model.quantization out."
        )
    if not weights:
        raise ValueError(
            f"model.quantization={settings.quantization}: 4-bit weights are not sharded. Train on one device "
            "(trainer.n_gpus_per_node=1), or leave model.quantization out."
        )


def _quantized(model: PreTrainedModel, dtype: torch.dtype, device: torch.device | None) -> PreTrainedModel:
    """The model with 4-bit weights in its decoder, and the others in `dtype`."""
    quantize_layers(model, decoder_of(model), device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def _with_adapters(model: PreTrainedModel, settings: ModelConfig) -> PreTrainedModel:
    if settings.lora_adapter_path:
        return _with_dropout(load_adapters(model, settings.lora_adapter_path), settings.lora_dropout)
    if settings.lora_rank > 0:
        return add_adapters(
            model,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
            target_modules=settings.target_modules,
            exclude_modules=settings.exclude_modules,
        )
    return model


def _with_dropout(adapted: Any, rate: float) -> Any:
    """Loaded adapters with this dropout. Folders have that of an earlier training, often 0.05, with which the
    policy that is trained would not be the one that samples."""
    for layer in adapted_layers(adapted):
        for name in layer.lora_dropout:
            layer.lora_dropout[name] = nn.Dropout(rate) if rate else nn.Identity()
    for settings in adapted.peft_config.values():
        settings.lora_dropout = rate
    return adapted


# --- meta device --------------------------------------------------------------------------------------------
#
# Parameters on the meta device have shape and dtype but no memory; buffers (rotary frequencies ...) are real.
# A rank builds such a module, shards it, and allocates memory for its own shards alone.


@contextmanager
def meta_init() -> Iterator[None]:
    """Inside the block every new parameter of a module is moved to the meta device at once."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment] # replaced on purpose
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign] # restored


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights of a model, such as the routing biases of DeepSeek-V3."""
    persistent = set(module.state_dict())
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


@torch.no_grad()
def load_buffers(module: nn.Module, source: WeightFiles) -> None:
    """Fill persistent buffers from the files: loaders of shards go through parameters alone."""
    buffers = persistent_buffers(module)
    if not buffers or source.gguf_file:
        return
    model = cast("PreTrainedModel", module)
    wanted = {name_in_files(model, name, buffer): buffer for name, buffer in buffers.items()}
    folder = Path(source.name)
    for file in weight_files(folder):
        opened = open_weights(folder / file)
        for name in wanted.keys() & set(opened.keys()):
            wanted[name].copy_(opened.get_tensor(name))


def allocate(module: nn.Module, device: torch.device, storage: torch.device | None = None) -> None:
    """Memory, not initialised, for every parameter of a module (or its shards) on the meta device.

    Buffers go to `device`, parameters there or to `storage`.
    """

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=storage or device)
        return tensor.to(device)

    module._apply(place)
    base = base_model(module)
    tie_weights = getattr(base, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()  # each name got memory of its own
