"""LoRA adapters (Hu et al. 2021) through peft: W x becomes W x + (alpha / rank) B A x, and only A and B are
trained. LoRA merge (`merged_weights`) adds the adapters to the weights for export.

With the adapters off the model is what it was before training, so it is its own reference.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.config.schema.model import ModelConfig
from strop.extras import require
from strop.models.adapter_files import check_adapter_folder, refuse_part_of_adapter
from strop.models.heads import HEAD
from strop.models.nf4.layers import Nf4Linear, dense_weight, dequantize_layers


def add_adapters(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = ModelConfig.target_modules,
    exclude_modules: str | Sequence[str] | None = None,
) -> Any:
    """`model` with new adapters (B = 0, so it computes the same at first); everything but them is frozen.

    A scalar head is trained whole: it is too small to adapt.
    """
    peft = require("peft", extra="lora", why="LoRA (lora_rank > 0)")
    _check_rank(model, rank)
    if target_modules == ModelConfig.target_modules:
        exclude_modules = _with_names(exclude_modules, _special_linears(model))
    if isinstance(getattr(model, HEAD, None), nn.Linear):
        exclude_modules = _with_names(exclude_modules, [HEAD])
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=_pattern_or_list(target_modules),
        exclude_modules=_pattern_or_list(exclude_modules),
        bias="none",
    )
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        if "is incompatible with" in str(error):  # the kernels of Mamba layers take weights without adapters
            raise ValueError(
                f"LoRA: target_modules={target_modules!r} names a module that peft does not adapt: {error} "
                "Add it to exclude_modules, for instance model.exclude_modules=[out_proj]."
            ) from error
        raise ValueError(
            f"LoRA: target_modules={target_modules!r} (exclude_modules={exclude_modules!r}) matches no "
            f"module of {type(model).__name__}. Its linear modules are: {', '.join(_linears(model))}. "
            f"({error})"
        ) from error
    _refuse_tied(adapted)
    return _train_head(adapted)


def _check_rank(model: nn.Module, rank: int) -> None:
    """Refuse a rank that is larger than the smaller side of every matrix: A and B would have more weights
    than the matrices, can express nothing more, and take minutes to build."""
    largest = 0
    where = ""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and min(module.out_features, module.in_features) > largest:
            largest = min(module.out_features, module.in_features)
            where = f"{name} is {module.out_features} x {module.in_features}"
    if largest and rank > largest:
        raise ValueError(rank_message(rank, largest, where))


def rank_message(rank: int, largest: int, where: str) -> str:
    """Why a LoRA rank is too large."""
    return (
        f"lora_rank={rank} is larger than the smaller side of every matrix of the model ({where}). A rank "
        f"over {largest} adds weights and can express nothing more. Use at most {largest}; 8 to 64 is usual."
    )


def _pattern_or_list(modules: str | Sequence[str] | None) -> str | list[str] | None:
    """A pattern as it is, names as a list."""
    if modules is None or isinstance(modules, str):
        return modules
    return list(modules)


def _linears(model: nn.Module) -> list[str]:
    """Last names of the linear modules of a model."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found.add(name.rsplit(".", 1)[-1])
    return sorted(found)


def load_adapters(model: nn.Module, path: str, *, only_lora: bool = True) -> Any:
    """`model` with the adapters of a folder, ready to be trained further. `only_lora`: refuse adapters of
    other kinds, which `merged_weights` and `adapters_off` would leave out; peft itself can merge them."""
    peft = require("peft", extra="lora", why="lora_adapter_path")
    folder = Path(path).expanduser()
    check_adapter_folder(folder, path, only_lora=only_lora)
    mapping = getattr(model, "_checkpoint_conversion_mapping", {})
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        # Once more, because only this call says which weights were not loaded.
        loaded = adapted.load_adapter(str(folder), FIRST_ADAPTER, is_trainable=True, key_mapping=mapping)
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"The adapter of lora_adapter_path={path!r} cannot be loaded into this model: {reason}"
        ) from error
    refuse_part_of_adapter(path, loaded.missing_keys, loaded.unexpected_keys)
    _refuse_tied(adapted)
    return _train_head(adapted)


def _refuse_tied(adapted: Any) -> None:
    """Refuse adapters of an embedding or output head that have one weight: it can hold only one of both."""
    core = base_model(adapted)
    parts = (core.get_output_embeddings(), core.get_input_embeddings())
    if None in parts or without_adapter(parts[0]).weight is not without_adapter(parts[1]).weight:
        return
    for name, module in core.named_modules():
        if module in parts and module is not without_adapter(module):
            raise ValueError(
                f"LoRA: target_modules adapts {name!r}, but embedding and output head of the model have one "
                "weight (tie_word_embeddings), so the adapter cannot be merged. Leave it out."
            )


def _with_names(excluded: str | Sequence[str] | None, names: Sequence[str]) -> str | Sequence[str] | None:
    """The modules that get no adapter, and those with these names."""
    if not names:
        return excluded
    if isinstance(excluded, str):
        return rf"(?:{excluded})|(?:.*\.)?(?:{'|'.join(map(re.escape, names))})"
    return [*(excluded or []), *names]


def _special_linears(model: nn.Module) -> list[str]:
    """Linear modules that compute something else than a product: the router of Llama 4, the grouped
    projections of DeepSeek-V4. An adapter of peft would add to what they return."""
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    kinds = {kind for kind in {type(part) for _, part in linears} if not _is_product(kind)}
    return [name for name, part in linears if type(part) in kinds]


@torch.no_grad()
def _is_product(kind: type[nn.Linear]) -> bool:
    if kind.forward in (nn.Linear.forward, Nf4Linear.forward):
        return True
    states = torch.ones(1, 2)
    try:
        probe = kind(2, 3).to_empty(device="cpu")  # ranks make adapters on the meta device
        for weight in probe.parameters():
            weight.copy_(torch.arange(weight.numel()).view_as(weight))
        return torch.equal(probe(states), nn.Linear.forward(probe, states))
    except (TypeError, AttributeError, RuntimeError):  # it is made of other arguments, or returns no tensor
        return False


def _train_head(adapted: Any) -> Any:
    head = getattr(adapted, HEAD, None)
    if isinstance(head, nn.Linear):
        head.requires_grad_(True)
    return adapted


# --- several adapters over one model ------------------------------------------------------------------------

FIRST_ADAPTER = "default"
"""The name that `add_adapters` gives to an adapter."""
_ADAPTER_WEIGHT = re.compile(r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.([^.]+)")


def adapter_names(model: Any) -> list[str]:
    """The adapters of a model, in the order in which they were added."""
    return list(model.peft_config)


def add_adapter(model: Any, name: str, *, rank: int, alpha: float, seed: int) -> None:
    """Add another adapter on the modules of the first one. `seed` alone decides about its first weights."""
    _check_rank(model, rank)
    settings = copy.deepcopy(model.peft_config[FIRST_ADAPTER])
    settings.r = rank
    settings.lora_alpha = alpha
    settings.use_rslora = False  # the scale is alpha / rank
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(name, settings)


def remove_adapter(model: Any, name: str) -> None:
    """Delete an adapter that is not active."""
    model.delete_adapter(name)


def merge_into_base(model: Any, name: str) -> None:
    """Add an adapter to the weights of the Hugging Face model, and take all adapters off it."""
    dequantize_layers(model, next(model.parameters()).dtype)
    model.merge_and_unload(adapter_names=[name])


def activate_adapter(model: Any, name: str) -> None:
    """From now on the model computes with this adapter, and only its weights have gradients."""
    model.set_adapter(name)


def adapted_layers(model: nn.Module) -> list[Any]:
    """The modules of peft that have the weights of all adapters."""
    return [part for part in model.modules() if isinstance(getattr(part, "lora_B", None), nn.ModuleDict)]


def only_adapter(layer: Any) -> str | None:
    """The adapter that a layer adds, if it is the only active one and of the ordinary kind."""
    if layer.disable_adapters or layer.merged:
        return None
    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A or names[0] in layer.lora_variant:
        return None
    name: str = names[0]
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.p and layer.training:
        return None
    second = layer.lora_B[name]
    # The engine leaves an adapter out of some rows by a hook, which only a call of the module runs.
    if second.bias is not None or second._forward_hooks or second._forward_pre_hooks:
        return None
    return name


def without_adapter(module: Any) -> Any:
    """The module of Hugging Face inside a layer of peft, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def compute_with_adapter(model: Any, layers: Sequence[Any], name: str) -> None:
    """From now on the model computes with this adapter; which weights have gradients is the caller's.

    `set_adapter` of peft walks through all modules and visits the weights of all adapters, which takes longer
    than the kernels of a small pass.
    """
    for layer in layers:
        layer._active_adapter = [name]
    model.active_adapter = name
    model.base_model.active_adapter = name


def without_adapter_name(weight: str) -> str:
    """The name of a weight of an adapter, without the name of the adapter.

    >>> without_adapter_name("base_model.model.q_proj.lora_A.mine.weight")
    'base_model.model.q_proj.lora_A.weight'
    """
    return _ADAPTER_WEIGHT.sub(r".\1", weight)


def with_adapter_name(weight: str, adapter: str) -> str:
    """The name of a weight of an adapter, with another adapter in it.

    >>> with_adapter_name("base_model.model.q_proj.lora_A.mine.weight", "other")
    'base_model.model.q_proj.lora_A.other.weight'
    """
    return _ADAPTER_WEIGHT.sub(rf".\1.{adapter}", weight)


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter of a peft model belongs to an adapter."""
    return _ADAPTER_WEIGHT.search(name) is not None


def base_name(name: str) -> str:
    """The Hugging Face name of a module or weight of a peft model.

    >>> base_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name.removeprefix("base_model.model."))


def adapted_weight(paths: Mapping[nn.Module, str], layer: Any) -> str:
    """The name in a peft model of the weight that an adapted layer adds to. `paths` are the names of all
    modules. A layer of experts has several weights, each with a layer of peft around the others'."""
    if hasattr(layer, "parameter_name"):
        return f"{paths[layer.get_base_layer()]}.{layer.parameter_name}"
    return f"{paths[layer]}.base_layer.weight"


def adapter_scale(model: Any, name: str) -> float:
    """What the product B A of an adapter is multiplied by: alpha / rank, or what its adapter_config.json says
    instead (use_rslora ...)."""
    scales = {float(layer.scaling[name]) for layer in adapted_layers(model) if name in layer.scaling}
    if len(scales) != 1:
        raise ValueError(
            f"The adapter {name!r} has other scales in other modules ({sorted(scales)}), as alpha_pattern or "
            "rank_pattern of its adapter_config.json make them. With several adapters, each must have "
            "one scale."
        )
    return scales.pop()


def write_adapter_config(model: Any, name: str, folder: Path) -> None:
    """Write the adapter_config.json that peft reads."""
    settings = copy.deepcopy(model.peft_config[name])
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def has_adapters(model: nn.Module) -> bool:
    """Whether this is a model with LoRA adapters."""
    return hasattr(model, "peft_config")


def base_model(model: Any) -> Any:
    """The Hugging Face model, without the wrapper of peft."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def decoder_of(model: Any) -> PreTrainedModel:
    """The language model without its output head."""
    core = base_model(model)
    decoder: PreTrainedModel = core.get_decoder()
    if decoder is not core:
        return decoder
    # Llama4ForCausalLM names its decoder otherwise than transformers looks for it.
    return next((part for part in core.children() if isinstance(part, PreTrainedModel)), decoder)


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Inside the block the adapters are off: the model before training."""
    if not has_adapters(model):
        raise ValueError(
            f"{type(model).__name__} has no adapters to switch off; a reference needs a frozen copy of the "
            "model."
        )
    with model.disable_adapter():
        yield


@torch.no_grad()
def merged_weights(
    model: nn.Module, *, start: str = "", without: tuple[str, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """LoRA merge: all weights by their Hugging Face name, with the adapters added; the model is not changed.
    4-bit weights are dequantised.

    Only those whose names in the model begin with `start`, and with none of `without`.
    """
    paths = {part: name for name, part in model.named_modules()}
    layers: dict[str, Any] = {}
    for module in paths:
        if hasattr(module, "get_delta_weight"):
            layers[adapted_weight(paths, module)] = module
    dtype = next(model.parameters()).dtype
    quantized = {
        f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, Nf4Linear)
    }
    for name, parameter in model.named_parameters():
        if not name.startswith(start) or name.startswith(without):
            continue
        weight: Tensor = parameter
        if name in quantized:
            weight = dense_weight(quantized[name], dtype)
        if is_adapter_weight(name):
            continue
        plain = base_name(name)
        owner = layers.get(name)
        if owner is not None:
            delta = sum(owner.get_delta_weight(adapter).float() for adapter in owner.active_adapters)
            yield plain, (weight.float() + delta).to(weight.dtype)
        else:
            yield plain, weight.detach()
