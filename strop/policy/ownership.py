"""Loaded models that belong to a policy (two of them must not train one module), and their tokenizers."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from strop.config.schema.model import ModelConfig
from strop.models.build import build_tokenizer
from strop.models.lora import has_adapters
from strop.models.patches import applied_patches, undo_patches

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class _Before:
    """What a model was like when a policy took it."""

    training: bool
    checkpointing: bool
    trained: frozenset[str]
    """Parameters that had gradients."""


_owned: weakref.WeakKeyDictionary[PreTrainedModel, _Before] = weakref.WeakKeyDictionary()


def module_device(module: PreTrainedModel, device: str) -> str:
    """The kind of device that a loaded model is on. Refuses a model that cannot be trained here, or that
    somebody else trains."""
    devices = sorted({parameter.device.type for parameter in module.parameters()})
    if "meta" in devices:
        raise ValueError("The model has weights on the meta device, which hold no numbers. Load it first.")
    if len(devices) != 1:
        raise ValueError(
            f"The model is on several kinds of devices ({', '.join(devices)}). Move it to one of them."
        )
    if device != "auto" and device != devices[0]:
        raise ValueError(
            f"The model is on {devices[0]}, and device={device} was asked for. Move it by "
            f"model.to({device!r}), or give device='auto'."
        )
    if module in _owned or applied_patches(module):
        raise ValueError(
            "The model belongs to another policy or to a run. Close that first, or load the model a second "
            "time."
        )
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError(
            "The model has gradients: somebody else trains it. Finish that training, or call "
            "model.zero_grad(set_to_none=True) first."
        )
    if has_adapters(module):
        raise ValueError(
            "The model has adapters of peft already. Give the model without them, and lora_rank or "
            "lora_adapter_path."
        )
    return devices[0]


def own_module(module: PreTrainedModel) -> None:
    """From now on the model belongs to a policy."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    _owned[module] = _Before(module.training, module.is_gradient_checkpointing, frozenset(trained))


def release_module(module: PreTrainedModel) -> None:
    """The model belongs to its owner again, as it was except for its weights and their precision."""
    undo_patches(module)
    before = _owned.pop(module)
    module.train(before.training)
    if module.is_gradient_checkpointing and not before.checkpointing:
        module.gradient_checkpointing_disable()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in before.trained)


def find_tokenizer(settings: ModelConfig, module: PreTrainedModel | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the configuration, or of the folder that a loaded model came from."""
    if module is not None and not settings.tokenizer_path:
        path = module.config.name_or_path
        if not path:
            raise ValueError("Policy(model, tokenizer): a loaded model needs its tokenizer; none was given.")
        settings = dataclasses.replace(settings, tokenizer_path=path)
    return build_tokenizer(settings)
