"""From a checkpoint to a folder that transformers loads.

LoRA is merged into the weights, or kept as a peft adapter. Value and reward models become sequence classifiers (token
classifiers where the head has a bias).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.build import build_tokenizer, dtype_of
from strop.models.heads import HEAD, load_scalar_model, padding_beside_the_end, scalar_class
from strop.models.load import load_config, load_language_model, resolve
from strop.models.lora import add_adapters, load_adapters, merged_weights
from strop.run.merge_sources import Saved, read

SHARD_SIZE = "5GB"


def merge(
    local_dir: str,
    target_dir: str,
    *,
    base: str | None = None,
    dtype: str | None = None,
    keep_lora: bool = False,
    lora_alpha: float | None = None,
    ema: bool = False,
) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder; it appears whole or not at all.

    `base` replaces the model folder that the checkpoint names; `dtype` is that of the written weights (as the base says, unless
    told); `ema` takes the average over time instead of the last weights.
    """
    target = Path(target_dir).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--target_dir {target_dir} is not empty. Choose another, or delete it first.")
    saved = read(local_dir, base=base, lora_alpha=lora_alpha, ema=ema)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        aside.mkdir(parents=True)
        if keep_lora:
            _write_adapter(saved, aside)
        else:
            _write_folder(saved, aside, dtype)
        build_tokenizer(saved.settings).save_pretrained(aside)
        if target.exists():
            target.rmdir()
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def final_weights(saved: Saved) -> dict[str, Tensor]:
    """All weights under their Hugging Face names, adapters merged."""
    if not saved.has_adapters:
        weights = dict(saved.tensors)
    else:
        weights = {name: weight.detach() for name, weight in merged_weights(_adapted(saved))}
    config = _config(saved)
    weights = {name.replace("v_head.summary.", f"{HEAD}."): weight for name, weight in weights.items()}
    tied = weights.get("lm_head.weight")
    if tied is not None and config.tie_word_embeddings:
        embedding = next((weight for name, weight in weights.items() if name.endswith("embed_tokens.weight")), None)
        if embedding is not None and torch.equal(tied, embedding):
            del weights["lm_head.weight"]
    return weights


def _adapted(saved: Saved) -> Any:
    """A module with the saved adapters in place; what the checkpoint lacks comes from the base."""
    settings = saved.settings
    has_base = any(".base_layer." in name for name in saved.tensors)
    model = _skeleton(saved) if has_base else _base(saved)
    if settings.lora_adapter_path:
        model = load_adapters(model, settings.lora_adapter_path)
    else:
        model = add_adapters(
            model,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            target_modules=settings.target_modules,
            exclude_modules=settings.exclude_modules,
        )
    report = model.load_state_dict(saved.tensors, strict=False)
    lost = [name for name in report.missing_keys if ".lora_" in name]
    if report.unexpected_keys or lost:
        raise ValueError(
            f"The saved adapters do not fit {settings.path}: {len(report.unexpected_keys)} have no place "
            f"({report.unexpected_keys[:2]}), {len(lost)} are missing ({lost[:2]}). Is it the model of that run?"
        )
    return model


def _base(saved: Saved) -> Any:
    """The model below the adapters, in fp32."""
    source = resolve(saved.settings.path)
    config = _config(saved)
    if not saved.is_scalar:
        return load_language_model(source, config, trust_remote_code=saved.settings.trust_remote_code)
    return load_scalar_model(
        source.name, config, head_name=saved.settings.value_head_prefix, new_head=True, **source.weight_arguments
    )


def _skeleton(saved: Saved) -> Any:
    """The same model with no weights yet: the checkpoint has them all."""
    from transformers import AutoModelForCausalLM

    config = _config(saved)
    if saved.is_scalar:
        return scalar_class(config, bias=_has_bias(saved.tensors))(config)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=saved.settings.trust_remote_code)


def _config(saved: Saved) -> Any:
    settings = saved.settings
    return load_config(
        resolve(settings.path),
        override=settings.override_config,
        config_path=settings.hf_config_path,
        trust_remote_code=settings.trust_remote_code,
    )


def _has_bias(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(f"{HEAD}.bias") for name in tensors)


def _write_adapter(saved: Saved, folder: Path) -> None:
    if not saved.has_adapters:
        raise ValueError("--lora keep: this checkpoint has no adapters; all of its weights were trained.")
    if saved.is_scalar:
        raise ValueError("--lora keep: the head of a value model is trained beside its adapters, so they must be merged.")
    _adapted(saved).save_pretrained(folder)


def _write_folder(saved: Saved, folder: Path, dtype: str | None) -> None:
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    source = resolve(saved.settings.path)
    config = _config(saved)
    weights = final_weights(saved)
    kind = dtype_of(dtype) if dtype else getattr(config, "dtype", None) or torch.bfloat16
    weights = {name: weight.to(kind) if weight.is_floating_point() else weight for name, weight in weights.items()}
    if saved.is_scalar:
        config.num_labels, config.token_classification_bias = 1, _has_bias(weights)
        config.architectures = [scalar_class(config, bias=_has_bias(weights)).__name__]
        config.value_head_prefix = HEAD
        config.get_text_config().pad_token_id = padding_beside_the_end(build_tokenizer(saved.settings))
    config.dtype = kind
    config.save_pretrained(folder)
    save_torch_state_dict({name: weight.contiguous() for name, weight in weights.items()}, folder, max_shard_size=SHARD_SIZE)
    if not saved.is_scalar:
        with contextlib.suppress(OSError):  # not every model has one
            GenerationConfig.from_pretrained(source.name).save_pretrained(folder)
    _check(folder, saved.is_scalar, saved.settings.trust_remote_code)


def _check(folder: Path, scalar: bool, trust_remote_code: bool) -> None:
    """Load what was written: a folder that transformers takes for something else is of no use to anybody."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = load_config(resolve(str(folder)), trust_remote_code=trust_remote_code)
    token = scalar and bool(getattr(config, "token_classification_bias", False))
    kind: Any = AutoModelForCausalLM
    if scalar:
        kind = AutoModelForTokenClassification if token else AutoModelForSequenceClassification
    _, report = kind.from_pretrained(folder, output_loading_info=True, dtype="auto", trust_remote_code=trust_remote_code)
    missing, strange = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing or strange:
        raise ValueError(
            f"The checkpoint does not fit its configuration: {len(missing)} weights are missing ({missing[:3]}), "
            f"{len(strange)} have no place ({strange[:3]}). Is --base the model of that run?"
        )
