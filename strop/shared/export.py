"""Exports that transformers loads: `actor/huggingface`, its moving average, and `critic/huggingface`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from strop.algorithms.ema import EMA
from strop.backends.base import Backend, Roles
from strop.backends.fsdp.sharded import fill
from strop.backends.single import ModuleBackend
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.trainer import TrainerConfig
from strop.models.build import persistent_buffers
from strop.models.files.names import as_in_files
from strop.models.generation.settings import write_generation_config
from strop.models.load import copy_processor_files
from strop.models.lora import base_model, has_adapters
from strop.run.checkpoint.store import Export

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def exports(
    config: PpoConfig, roles: Roles, tokenizer: PreTrainedTokenizerBase, average: EMA | None
) -> dict[str, Export]:
    """The folders of the roles whose save_contents include hf_model, by their place in the checkpoint."""
    wanted: dict[str, Export] = {}
    if "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents:
        wanted["actor/huggingface"] = folder_of(roles.actor, tokenizer)
        if average is not None:
            with averaged(roles.actor, average):
                copies = {name: weight.clone() for name, weight in exported(roles.actor).items()}
            wanted["actor/huggingface_ema"] = Export(copies, folder_of(roles.actor, tokenizer).write_files)
    if roles.critic is not None and "hf_model" in config.critic.checkpoint.save_contents:
        wanted["critic/huggingface"] = folder_of(roles.critic, tokenizer)
    return wanted


def folder_of(backend: Backend, tokenizer: PreTrainedTokenizerBase) -> Export:
    """Weights of the backend's model (adapters merged), its configuration and the tokenizer."""
    module = backend.module
    if has_adapters(module):
        module = cast(Any, module).get_base_model()  # of peft
    model = cast("PreTrainedModel", module)

    def write(folder: Path) -> None:
        config = copy.deepcopy(model.config)
        config.architectures = [architecture_of(model)]
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            write_generation_config(generation, folder)
        tokenizer.save_pretrained(folder)
        copy_processor_files(model.config._name_or_path, folder)

    return Export(exported(backend), write)


def architecture_of(model: nn.Module) -> str:
    """The class of a model as transformers knows it. FSDP2 gives a sharded module a class of its own."""
    for kind in type(model).__mro__:
        if not issubclass(kind, FSDPModule):
            return kind.__name__
    raise AssertionError("every class is an object")


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    """All weights on rank 0, which writes them, with their names in files. All ranks take part in gathering,
    and keep nothing."""
    kept: dict[str, torch.Tensor] = {}
    for name, weight in backend.export_weights():
        if backend.ranks.is_rank0:
            kept[name] = weight
    if not backend.ranks.is_rank0:
        return kept
    model = base_model(backend.module)
    for name, buffer in persistent_buffers(model).items():
        kept.setdefault(name, buffer)
    return as_in_files(model, kept)


@contextmanager
def averaged(backend: Backend, average: EMA) -> Iterator[None]:
    """The model has its averaged weights inside the block."""
    masters = masters_of(backend)
    before = {name: master.clone() for name, master in masters.items()}
    assert isinstance(backend, ModuleBackend)
    try:
        backend.weights.load(average.average)
        yield
    finally:
        backend.weights.load(before)


def masters_of(backend: Backend) -> dict[str, torch.Tensor]:
    """The trained weights in master precision."""
    assert isinstance(backend, ModuleBackend)
    return {name: master.detach() for name, master in backend.weights.masters.items()}


def average_of(backend: Backend, trainer: TrainerConfig) -> EMA | None:
    """The moving average of the trained weights, if trainer.enable_ema is set."""
    if not trainer.enable_ema:
        return None
    return EMA(masters_of(backend), decay=trainer.ema_beta, fill=fill)
