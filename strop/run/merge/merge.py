"""Write a checkpoint as a folder that transformers loads, or compare it with such a folder.

LoRA is merged into the weights, or kept as a peft adapter. Critics and reward models become sequence
classifiers (token classifiers if the head has a bias).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strop.models.build import build_tokenizer, dtype_of, meta_init
from strop.models.files.names import as_in_files
from strop.models.generation.settings import read_generation_config, write_generation_config
from strop.models.heads import HEAD, load_scalar_model, pad_token_other_than_eos, scalar_class, untie
from strop.models.load import (
    copy_processor_files,
    language_model_class,
    load_config,
    load_language_model,
    resolve,
)
from strop.models.lora import add_adapters, decoder_of, load_adapters, merged_weights
from strop.models.nf4.layers import quantize_layers
from strop.run.merge.archive import find_tensor_name, read_archive
from strop.run.merge.sources import CodeTrust, MergeSource, read_source
from strop.run.merge.verl import read_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

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
    trust: CodeTrust | None = None,
) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder. A failure leaves no folder.

    `base` replaces the base model that the checkpoint names. `dtype` is that of the written weights (default:
    that of the base model). `ema` selects the moving average instead of the last weights. `trust` says what
    code may run; by default only that of installed libraries.
    """
    target = Path(target_dir).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--target_dir {target_dir} is not empty. Choose another, or delete it first.")
    saved = read_source(local_dir, base=base, lora_alpha=lora_alpha, ema=ema, trust=trust)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.mkdir(parents=True)
        if keep_lora:
            _write_adapter(saved, partial)
        else:
            _write_folder(saved, partial, dtype)
        build_tokenizer(saved.settings).save_pretrained(partial)
        copy_processor_files(saved.settings.path, partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def final_weights(saved: MergeSource) -> dict[str, Tensor]:
    """All weights under their Hugging Face names, with LoRA merged."""
    saved_weights = saved.tensors.items()
    if saved.has_adapters:
        saved_weights = dict(merged_weights(_with_adapters(saved))).items()
    weights: dict[str, Tensor] = {}
    for name, weight in saved_weights:
        weights[name.replace("v_head.summary.", f"{HEAD}.")] = weight.detach()
    if _config(saved).tie_word_embeddings and _has_own_head(weights) is False:
        weights.pop("lm_head.weight", None)
    return weights


def named_as_in_files(saved: MergeSource, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with the names of published folders, which those of other frameworks have already."""
    with meta_init():
        model = _empty_model(saved)
    if not weights.keys() <= model.state_dict().keys():
        return weights
    named = as_in_files(model, weights)
    for name, weight in named.items():
        if weight.untyped_storage().nbytes() > weight.nbytes:  # huggingface_hub writes no part of a tensor
            named[name] = weight.clone()
    return named


def _untie_own_head(config: PretrainedConfig, weights: Mapping[str, Tensor]) -> None:
    """transformers loads a head of its own although the configuration ties it to the embedding; other
    programs, and a model made from the configuration alone, would lose it."""
    if config.tie_word_embeddings and _has_own_head(weights):
        untie(config)


def _has_own_head(weights: Mapping[str, Tensor]) -> bool | None:
    """Whether the output head differs from the embedding; None if there are not both."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for part in ("lm_head", "embed_tokens"):
            if f".{name}".endswith((f".{part}.weight", f".{part}.base_layer.weight")):
                found.setdefault(part, weight)
    if len(found) < 2:
        return None
    return not torch.equal(found["lm_head"], found["embed_tokens"])


def _with_adapters(saved: MergeSource) -> PreTrainedModel:
    """The model with its saved adapters. Weights that the checkpoint lacks come from the base model."""
    settings = saved.settings
    if any(".base_layer." in name for name in saved.tensors):
        model = _empty_model(saved)
    else:
        model = _base_model(saved)
        if settings.quantization is not None:  # the adapters were trained over these weights
            quantize_layers(model, decoder_of(model))
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
    try:
        report = model.load_state_dict(saved.tensors, strict=False)
    except RuntimeError as error:  # a weight of another shape
        raise ValueError(
            f"The saved adapters do not fit {settings.path}: {' '.join(str(error).split())[:300]}"
        ) from error
    missing = [name for name in report.missing_keys if ".lora_" in name]
    if report.unexpected_keys or missing:
        raise ValueError(
            f"The saved adapters do not fit {settings.path}: {len(report.unexpected_keys)} have no place "
            f"({report.unexpected_keys[:2]}), {len(missing)} are missing ({missing[:2]}). Is it the model of "
            "that run?"
        )
    return model


def _base_model(saved: MergeSource) -> PreTrainedModel:
    """The base model of the adapters, in fp32."""
    source = resolve(saved.settings.path)
    config = _config(saved)
    if not saved.is_scalar:
        return load_language_model(source, config, trust_remote_code=saved.settings.trust_remote_code)
    return load_scalar_model(
        source.name,
        config,
        head_name=saved.settings.value_head_prefix,
        new_head=True,
        **source.weight_arguments,
    )


def _empty_model(saved: MergeSource) -> PreTrainedModel:
    """The same model with new weights, for a checkpoint that holds them all."""
    config = _config(saved)
    _untie_own_head(config, saved.tensors)
    if saved.is_scalar:
        return scalar_class(config, bias=_has_bias(saved.tensors))(config)
    made: PreTrainedModel = language_model_class(config).from_config(
        config, trust_remote_code=saved.settings.trust_remote_code
    )
    return made


def _config(saved: MergeSource) -> PretrainedConfig:
    settings = saved.settings
    return load_config(
        resolve(settings.path),
        override=settings.override_config,
        config_path=settings.hf_config_path,
        trust_remote_code=settings.trust_remote_code,
    )


def _has_bias(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(f"{HEAD}.bias") for name in tensors)


def _write_adapter(saved: MergeSource, folder: Path) -> None:
    if not saved.has_adapters:
        raise ValueError("--lora keep: this checkpoint has no adapters; all of its weights were trained.")
    if saved.is_scalar:
        raise ValueError(
            "--lora keep: the head of a value model is trained together with its adapters, so they must be "
            "merged."
        )
    _with_adapters(saved).save_pretrained(folder)


def _write_folder(saved: MergeSource, folder: Path, dtype: str | None) -> None:
    from huggingface_hub import save_torch_state_dict

    config = _config(saved)
    weights = final_weights(saved)
    _untie_own_head(config, weights)
    written_dtype = getattr(config, "dtype", None) or torch.bfloat16
    if dtype:
        written_dtype = dtype_of(dtype)
    for name, weight in weights.items():
        if weight.is_floating_point():
            weight = weight.to(written_dtype)
        weights[name] = weight.contiguous()
    weights = named_as_in_files(saved, weights)
    if saved.is_scalar:
        has_bias = _has_bias(weights)
        config.num_labels = 1
        config.token_classification_bias = has_bias
        config.architectures = [scalar_class(config, bias=has_bias).__name__]
        config.value_head_prefix = HEAD
        config.get_text_config().pad_token_id = pad_token_other_than_eos(build_tokenizer(saved.settings))
    config.dtype = written_dtype
    config.save_pretrained(folder)
    save_torch_state_dict(weights, folder, max_shard_size=SHARD_SIZE)
    if not saved.is_scalar:
        generation = read_generation_config(resolve(saved.settings.path).name)
        if generation is not None:
            write_generation_config(generation, folder)
    _check(folder, saved.is_scalar, saved.settings.trust_remote_code)


def _check(folder: Path, scalar: bool, trust_remote_code: bool) -> None:
    """Load the written folder with transformers and raise if weights are missing or have no place."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = load_config(resolve(str(folder)), trust_remote_code=trust_remote_code)
    loader: type[_BaseAutoModelClass] = language_model_class(config)
    bias = bool(getattr(config, "token_classification_bias", False))
    if scalar and getattr(config, "vision_config", None) is not None:
        # transformers has no classifier with a vision tower
        loader = cast("type[_BaseAutoModelClass]", scalar_class(config, bias=bias))
    elif scalar:
        loader = AutoModelForTokenClassification if bias else AutoModelForSequenceClassification
    _, report = loader.from_pretrained(
        folder, output_loading_info=True, dtype="auto", trust_remote_code=trust_remote_code
    )
    missing = sorted(report["missing_keys"])
    unexpected = sorted(report["unexpected_keys"])
    if missing or unexpected:
        raise ValueError(
            f"The checkpoint does not fit its configuration: {len(missing)} weights are missing "
            f"({missing[:3]}), {len(unexpected)} have no place ({unexpected[:3]}). Is --base the model of "
            "that run?"
        )


@dataclass
class Differences:
    """Differences between a checkpoint (ours) and a folder (theirs)."""

    compared: int = 0
    only_ours: list[str] = field(default_factory=list)
    only_theirs: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of tensors whose numbers differ."""

    def __bool__(self) -> bool:
        return bool(self.only_ours or self.only_theirs or self.shapes or self.values)

    def lines(self, limit: int = 5) -> list[str]:
        """One line per difference, at most `limit` of each kind."""
        lines: list[str] = []
        for name in self.only_ours[:limit]:
            lines.append(f"{name} is only in the checkpoint")
        for name in self.only_theirs[:limit]:
            lines.append(f"{name} is only in the folder")
        for name, (ours, theirs) in islice(self.shapes.items(), limit):
            lines.append(f"{name} has shape {ours} in the checkpoint and {theirs} in the folder")
        for name, gap in islice(self.values.items(), limit):
            lines.append(f"{name} differs by up to {gap:.3g}")
        total = len(self.only_ours) + len(self.only_theirs) + len(self.shapes) + len(self.values)
        if total > len(lines):
            lines.append(f"... and {total - len(lines)} more")
        return lines


def compare_with_folder(
    weights: Mapping[str, Tensor], folder: str | Path, *, atol: float = 0.0
) -> Differences:
    """The differences between weights and a folder, in the dtype of the folder: ours are cast to it first."""
    found = Differences()
    theirs = set()
    for name, tensor in folder_tensors(Path(folder).expanduser()):
        theirs.add(name)
        if name not in weights:
            found.only_theirs.append(name)
            continue
        ours = weights[name].to(tensor.dtype)
        found.compared += 1
        if ours.shape != tensor.shape:
            found.shapes[name] = (tuple(ours.shape), tuple(tensor.shape))
        elif not torch.equal(ours, tensor):
            gap = float((ours.double() - tensor.double()).abs().max())
            if not gap <= atol:
                found.values[name] = gap
    found.only_ours = [name for name in weights if name not in theirs]
    return found


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a Hugging Face folder, one at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and (folder / "pytorch_model.bin").is_file():
        content = read_archive(folder / "pytorch_model.bin", find_tensor_name)
        if not isinstance(content, dict):
            raise ValueError(f"{folder / 'pytorch_model.bin'} holds a {type(content).__name__}, not weights.")
        yield from content.items()
        return
    if not files:
        raise ValueError(
            f"{folder} holds no *.safetensors and no pytorch_model.bin, so there is nothing to compare with."
        )
    for file in _indexed_files(folder, files):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def _indexed_files(folder: Path, files: list[Path]) -> list[Path]:
    """The files that the index of the folder names, or all of them if it has no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return files
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map.")
    indexed = set(map(str, weight_map.values()))
    missing = sorted(indexed - {file.name for file in files})
    if missing:
        raise ValueError(f"{folder} is not complete: {missing[0]} is missing ({len(missing)} files in all).")
    return [file for file in files if file.name in indexed]
