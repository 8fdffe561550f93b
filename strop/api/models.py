"""Models and tokenizers that are given as objects. They are saved in the folder of the run, which starts from
this copy: the object itself is not changed, and the run can go on without it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NAME_DIGITS = 12


def is_name(model: object) -> bool:
    """Whether a model is given as a name or a folder."""
    return isinstance(model, str | os.PathLike)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Save a module and its tokenizer under a name that changes with their content; returns their folder."""
    refuse_unusable(model)
    tokenizer = tokenizer or _tokenizer_of(model)
    part = _new_part(folder)
    tokenizer.save_pretrained(part)
    target = folder / f"model-{_fingerprint(model)}-{_digest_of_files(part)}"
    if not target.exists():
        write_module(model, part)
    return _finish(part, target)


def write_module(model: PreTrainedModel, folder: Path) -> None:
    """Save a module as it is. transformers does not save every generation config that it loads."""
    from strop.models.generation.settings import write_generation_config

    kept = getattr(model, "generation_config", None)
    if kept is None:
        model.save_pretrained(folder)
        return
    model.generation_config = type(kept)()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = kept
    write_generation_config(kept, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Save a tokenizer in the same way."""
    part = _new_part(folder)
    tokenizer.save_pretrained(part)
    return _finish(part, folder / f"tokenizer-{_digest_of_files(part)}")


def _new_part(folder: Path) -> Path:
    """An empty folder to write to; it gets its name when it is complete."""
    part = folder / f".{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def _digest_of_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:NAME_DIGITS]


def _finish(part: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(part)
    else:
        part.rename(target)
    return target.absolute()


def refuse_unusable(model: object) -> None:
    """A ValueError for an object that is no whole module of transformers, or that somebody trains."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        kind = f"{type(model).__module__}.{type(model).__name__}"
        hint = ""
        if kind.startswith("peft."):
            hint = " Merge its adapters first (merge_and_unload), or name their folder in lora_adapter_path."
        raise ValueError(f"model is a {kind}; it must be a name, a folder, or a model of transformers.{hint}")
    meta = [name for name, weight in model.named_parameters() if weight.is_meta]
    if meta:
        raise ValueError(
            f"model has weights on the device meta, which holds no values ({meta[0]} and {len(meta) - 1} "
            "more). Load it with its weights on a CPU or GPU, or give its folder."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("model is quantized; give a model in bf16 or fp32, or the folder of one.")
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    if trained:
        raise ValueError(
            f"model holds gradients ({trained[0]} and {len(trained) - 1} more): it is in training elsewhere. "
            "End that training, call model.zero_grad(set_to_none=True), and give it again."
        )


def _tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    from strop.models.load import load_tokenizer

    name = model.name_or_path
    if not name:
        raise ValueError("model is a module that was not loaded from a folder. Give tokenizer= with it.")
    return load_tokenizer(name)


def _fingerprint(model: PreTrainedModel) -> str:
    """A hash of all weights and of the configurations that are saved with them."""
    import torch

    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            digest.update(_written(config).encode())
    return digest.hexdigest()[:NAME_DIGITS]


def _written(config: PretrainedConfig | GenerationConfig) -> str:
    """A configuration as text, without where it was loaded from and which version wrote it."""
    settings = config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str)


def plain_module(trained: nn.Module, weights: dict[str, Any]) -> PreTrainedModel:
    """A module of transformers with these weights and nothing of a run: no patches, adapters or hooks.

    The weights are shared with `trained`, not copied.
    """
    from strop.models.build import meta_init
    from strop.models.lora import base_model

    source = cast("PreTrainedModel", base_model(trained))
    with meta_init():
        made = type(source)(source.config)
    buffers = dict(source.named_buffers())
    tensors = {**{name: buffers[name] for name, _ in made.named_buffers() if name in buffers}, **weights}
    made.load_state_dict(tensors, strict=False, assign=True)
    made.tie_weights()
    if source.can_generate():
        made.generation_config = source.generation_config
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    device = next(iter(weights.values())).device
    for name, buffer in made.named_buffers():
        if buffer.device != device:
            owner, _, last = name.rpartition(".")
            setattr(made.get_submodule(owner), last, buffer.to(device))
    return made.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers in the block, as on the command line."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
