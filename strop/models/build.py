"""From the `model` section of a configuration to a module: policy, reference, critic or reward model."""

from __future__ import annotations

import contextlib
import logging
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from strop.config.schema.model import Model
from strop.extras import require
from strop.models.attention import packing_obstacle, padded_attention, set_attention
from strop.models.heads import hollow_scalar_model, load_scalar_model
from strop.models.hollow import hollow
from strop.models.load import load_config, load_language_model, load_tokenizer, resolve
from strop.models.lora import add_adapters, load_adapters
from strop.models.precision import widen_residual
from strop.registry import load_module

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
    if name not in DTYPES:
        raise ValueError(f"Unknown precision {name!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision to compute in: `name`, except that a CPU without bf16 instructions, where bf16 is hundreds of times
    slower than fp32, computes in fp32."""
    wanted = dtype_of(name)
    slow = device.type == "cpu" and wanted != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if slow:
        _tell_fp32(name)
    return torch.float32 if slow else wanted


@cache
def _tell_fp32(name: str) -> None:
    """Once, though every role asks."""
    log.warning("This CPU has no bf16 instructions; computing in fp32 instead of %s.", name)


def build_policy(settings: Model, *, dtype: torch.dtype = torch.float32, weights: bool = True) -> Any:
    """The language model in training, on the CPU, weights in `dtype`; with adapters when lora_rank says so.

    Without `weights`, here and below, its parameters have shapes only (see models/hollow.py).
    """
    return _finish(_language_model(settings, dtype, weights), settings, weights)


def build_reference(settings: Model, *, dtype: torch.dtype = torch.float32, weights: bool = True) -> Any:
    """The same model without adapters, frozen."""
    return _language_model(settings, dtype, weights).requires_grad_(False).eval()


def build_critic(settings: Model, *, dtype: torch.dtype = torch.float32, weights: bool = True) -> Any:
    """A value model; a path without a scalar head (a language model) gets a new one."""
    return _finish(_scalar_model(settings, dtype, new_head=True, weights=weights), settings, weights)


def build_reward_model(settings: Model, *, dtype: torch.dtype = torch.float32) -> Any:
    """A frozen reward model; its folder must hold the scalar head."""
    return _scalar_model(settings, dtype, new_head=False).requires_grad_(False).eval()


def build_tokenizer(settings: Model) -> Any:
    """The tokenizer of tokenizer_path, or of the model itself."""
    _import_libraries(settings)
    return load_tokenizer(
        settings.tokenizer_path or settings.path,
        trust_remote_code=settings.trust_remote_code,
        chat_template=settings.custom_chat_template,
    )


def attention_of(settings: Model) -> str | None:
    """The attention function somebody chose for the padded layout."""
    chosen = settings.override_config.get("attn_implementation")
    return None if chosen is None else str(chosen)


def stored_dtype(settings: Model) -> torch.dtype:
    """The precision of the weights on the disk, as far as config.json says; fp32 where it does not."""
    found = getattr(_config(settings), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _language_model(settings: Model, dtype: torch.dtype, weights: bool = True) -> Any:
    _import_libraries(settings)
    source = resolve(settings.path)
    if not weights:
        with hollow():
            model = AutoModelForCausalLM.from_config(
                _config(settings), dtype=dtype, trust_remote_code=settings.trust_remote_code
            )
        return _prepare(model, settings)
    model = load_language_model(source, _config(settings), dtype=dtype, trust_remote_code=settings.trust_remote_code)
    return _prepare(model, settings)


def _scalar_model(settings: Model, dtype: torch.dtype, *, new_head: bool, weights: bool = True) -> Any:
    _import_libraries(settings)
    source = resolve(settings.path)
    if not weights:
        with hollow():
            return _prepare(hollow_scalar_model(_config(settings)).to(dtype), settings)
    model = load_scalar_model(
        source.name,
        _config(settings),
        head_name=settings.value_head_prefix,
        new_head=new_head,
        dtype=dtype,
        **source.weight_arguments,
    )
    return _prepare(model, settings)


def _config(settings: Model) -> Any:
    return load_config(
        resolve(settings.path),
        override=settings.override_config,
        config_path=settings.hf_config_path,
        trust_remote_code=settings.trust_remote_code,
    )


def _import_libraries(settings: Model) -> None:
    for name in (settings.external_lib or "").split(","):
        if name.strip():
            load_module(name.strip())


def _prepare(model: Any, settings: Model) -> Any:
    set_attention(model, attention_of(settings) or padded_attention(model))
    if settings.use_remove_padding:
        obstacle = packing_obstacle(model)
        if obstacle:
            raise ValueError(f"{type(model).__name__} cannot run packed: {obstacle}. Set model.use_remove_padding=False.")
    without_dropout(model)
    if settings.fp32_residual:
        widen_residual(model)
    if settings.use_liger:
        liger = require("liger_kernel.transformers.monkey_patch", extra="liger", why="model.use_liger")
        liger._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    return model


def _finish(model: Any, settings: Model, weights: bool = True) -> Any:
    with contextlib.nullcontext() if weights else hollow():
        model = _adapted(model, settings)
    if settings.enable_gradient_checkpointing:
        checkpoint_activations(model)
    return model


def _adapted(model: Any, settings: Model) -> Any:
    if settings.lora_adapter_path:
        return load_adapters(model, settings.lora_adapter_path)
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


def checkpoint_activations(model: Any) -> None:
    """Keep only what enters each layer and compute the rest again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def without_dropout(model: nn.Module) -> None:
    """No dropout anywhere: with it, the policy that is trained would not be the policy that sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
