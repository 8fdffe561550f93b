"""Folders that transformers loads: `actor/huggingface`, its average over time, and `critic/huggingface`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strop.algorithms.ema import EMA
from strop.backends.base import Backend
from strop.backends.single import SingleBackend
from strop.models.lora import has_adapters
from strop.run.checkpoint import Export

if TYPE_CHECKING:
    from strop.trainer.ppo import Roles


def exports(config: Any, roles: Roles, tokenizer: Any, average: EMA | None) -> dict[str, Export]:
    """What the roles whose save_contents name hf_model leave beside their state."""
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


def folder_of(backend: Backend, tokenizer: Any) -> Export:
    """Weights of the backend's model (adapters merged), its configuration and the tokenizer."""
    module: Any = backend.module
    if has_adapters(module):
        module = module.get_base_model()

    def write(folder: Path) -> None:
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        config.save_pretrained(folder)
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return Export(exported(backend), write)


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    """All weights, on the rank that writes them; the others take part in gathering them."""
    weights = backend.export_weights()
    return dict(weights) if backend.ranks.lead else {name: weight for name, weight in weights if False}


@contextmanager
def averaged(backend: Backend, average: EMA) -> Iterator[None]:
    """Inside the block the model has its averaged weights."""
    masters = masters_of(backend)
    before = {name: master.clone() for name, master in masters.items()}
    assert isinstance(backend, SingleBackend)
    try:
        backend.weights.load(average.average)
        yield
    finally:
        backend.weights.load(before)


def masters_of(backend: Backend) -> dict[str, torch.Tensor]:
    """The trained weights in their best precision."""
    assert isinstance(backend, SingleBackend)
    return {name: master.detach() for name, master in backend.weights.masters.items()}
