"""LoRA adapters that requests of the native engine select by name: checked and copied weights.

Every load of an adapter has a number. A request keeps the number that its adapter had when the request
arrived: all tokens of a completion come from the same load, also if the adapter is loaded again or unloaded
in the meantime. Cached prefixes belong to a number. The weights of a replaced load are freed when no request
in the engine has its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.models.layouts.mixers import mixer_names
from strop.models.lora import adapted_layers, base_model
from strop.registry import did_you_mean

NO_ADAPTER = 0
_PARTS = (".lora_A", ".lora_B")
_EXPERTS = ".experts."


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One load of an adapter."""

    name: str
    number: int
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """By path of the module: A [rank, in] and the transpose of scale * B, [rank, out], on the device and in
    the precision of the module."""

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(len(first) for first, _ in self.factors.values())


def adaptable(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear modules of a model by their path in the Hugging Face model, without what peft adds."""
    found = {}
    for path, part in base_model(model).named_modules():
        if isinstance(part, nn.Linear) and ".lora_" not in path:
            found[path.removesuffix(".base_layer")] = part
    return found


class Adapters:
    """Loaded adapters by name, and by number those that requests still use."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.by_name: dict[str, LoadedAdapter] = {}
        """The newest load of each."""
        self.by_number: dict[int, LoadedAdapter] = {}
        """Also replaced and unloaded ones, until no request uses them."""
        self._num_loads = 0

    def load(self, name: str, weights: Mapping[str, Tensor], scale: float) -> None:
        """Check and copy the weights of an adapter; see AdapterEngine."""
        if not name:
            raise ValueError("An adapter needs a name that is not empty.")
        if not math.isfinite(scale):
            raise ValueError(f"The adapter {name!r} has scale={scale}, which is not a finite number.")
        _check_model(self._model, name)
        factors = self._checked(name, weights, scale)
        self._num_loads += 1
        adapter = LoadedAdapter(name, self._num_loads, factors)
        self.by_name[name] = adapter
        self.by_number[adapter.number] = adapter

    def number_of(self, name: str) -> int:
        """The number of the newest load of an adapter."""
        return self.by_name[name].number

    def unload(self, name: str) -> None:
        """Requests cannot name it any more."""
        if name not in self.by_name:
            raise ValueError(f"No adapter {name!r} is loaded.{did_you_mean(name, self.by_name)}")
        del self.by_name[name]

    def drop_unused(self, used: Iterable[int]) -> None:
        """Free replaced and unloaded adapters, except those with the numbers `used`."""
        kept = {adapter.number for adapter in self.by_name.values()}
        kept.update(used)
        for number in self.by_number.keys() - kept:
            del self.by_number[number]

    def _checked(
        self, name: str, weights: Mapping[str, Tensor], scale: float
    ) -> dict[str, tuple[Tensor, Tensor]]:
        modules = adaptable(self._model)
        by_path: dict[str, dict[str, Tensor]] = {}
        for key, weight in weights.items():
            path, part = _split_key(name, key)
            if path not in modules:
                raise ValueError(
                    f"The adapter {name!r} adapts {path!r}, which is no linear module of the model."
                    f"{did_you_mean(path, modules)}"
                )
            by_path.setdefault(path, {})[part] = weight
        if not by_path:
            raise ValueError(f"The adapter {name!r} has no weights.")
        _refuse_mixers(name, by_path, mixer_names(self._model))
        factors = {}
        dtype = next(self._model.parameters()).dtype
        for path, parts in by_path.items():
            factors[path] = _factors(name, path, modules[path], parts, scale, dtype)
        finite = [torch.isfinite(weight).all() for pair in factors.values() for weight in pair]
        if not torch.stack([one.cpu() for one in finite]).all():
            raise ValueError(f"The adapter {name!r} has weights that are not finite numbers.")
        return factors


def _refuse_mixers(name: str, paths: Iterable[str], mixers: Sequence[str]) -> None:
    for path in paths:
        if path.startswith(tuple(f"{mixer}." for mixer in mixers)):
            raise ValueError(
                f"The adapter {name!r} adapts {path!r}: modules that carry a state along the row run "
                "sequence by sequence, and rows of several adapters cannot be told apart there. Leave them "
                "out of target_modules."
            )


def _split_key(name: str, key: str) -> tuple[str, str]:
    """Path of the module and .lora_A or .lora_B. Names in the files of peft have more around both."""
    plain = key.removeprefix("base_model.model.").removesuffix(".weight")
    for part in _PARTS:
        if plain.endswith(part):
            path = plain.removesuffix(part)
            if _EXPERTS in path:
                raise ValueError(
                    f"The adapter {name!r} adapts {path!r}: experts get other tokens than the rest of the "
                    "model, and rows of several adapters cannot be told apart there. Leave experts out of "
                    "target_modules."
                )
            return path, part
    raise ValueError(
        f"The adapter {name!r} has a weight {key!r}; names are the path of a linear module with .lora_A or "
        ".lora_B."
    )


def _factors(
    name: str, path: str, module: nn.Linear, parts: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`dtype`: what a module with 4-bit weights computes in."""
    if len(parts) < len(_PARTS):
        missing = next(part for part in _PARTS if part not in parts)
        raise ValueError(f"The adapter {name!r} has no {path}{missing}.")
    first, second = (parts[part].detach() for part in _PARTS)
    rank = len(first)
    expected = ((rank, module.in_features), (module.out_features, rank))
    if rank == 0 or (tuple(first.shape), tuple(second.shape)) != expected:
        raise ValueError(
            f"The adapter {name!r} has {tuple(first.shape)} and {tuple(second.shape)} as .lora_A and .lora_B "
            f"of {path!r}, which need [rank, {module.in_features}] and [{module.out_features}, rank]."
        )
    device = module.weight.device
    if module.weight.is_floating_point():
        dtype = module.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    scaled = second.to(device, wide) * scale
    return first.to(device, dtype, copy=True), scaled.t().to(dtype).contiguous()


def _check_model(model: nn.Module, name: str) -> None:
    """Refuse models to which rows of an adapter cannot be added."""
    if getattr(model, "divided", None) is not None:
        raise ValueError(
            f"The adapter {name!r} cannot be loaded: the weights are divided over several ranks. Set "
            "rollout.tensor_model_parallel_size=1."
        )
    for part in model.modules():
        if isinstance(getattr(part, "modules_to_save", None), nn.ModuleDict):
            raise ValueError(
                f"The adapter {name!r} cannot be loaded: the adapter of the model trains whole modules "
                "(modules_to_save), which cannot be left out for single rows."
            )
    for layer in adapted_layers(model):
        if layer.merged:
            raise ValueError(
                f"The adapter {name!r} cannot be loaded: adapters of peft are merged into the weights of the "
                "model, so the model before training is not there any more. Call unmerge_adapter() first."
            )
        if {*layer.lora_variant, *layer.lora_embedding_B} & set(layer.active_adapters):
            raise ValueError(
                f"The adapter {name!r} cannot be loaded: the adapter of the model adapts an embedding or is "
                "a variant of LoRA (use_dora ...), which cannot be left out for single rows."
            )
