"""LoRA layers in decode steps on a CPU: the product of the frozen weight and that of the adapter in one call.

peft computes three products and two sums. With few rows the two products of an adapter take as long as
starting them does, twice for each of the many linear layers of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.changes import Change, SetAttribute
from strop.models.lora import adapted_layers
from strop.models.lora_cpu.layers import plain_adapter
from strop.rollout.native.cpu.few_rows import Adapter, PackedWeight
from strop.rollout.native.cpu.frozen_weights import FrozenLinear
from strop.rollout.native.cpu.packed_linear import CompiledLinear


def adapted_changes(model: nn.Module, frozen: Iterable[FrozenLinear]) -> Iterator[Change]:
    """The forwards of LoRA layers over these frozen layers, where their products are compiled."""
    weights: dict[nn.Module | None, PackedWeight] = {}
    for one in frozen:
        if isinstance(one.forward, CompiledLinear):
            weights[one.layer] = one.forward.packed_weight
    for layer in adapted_layers(model):
        weight = weights.get(getattr(layer, "base_layer", None))
        if weight is not None and "forward" not in layer.__dict__:
            yield SetAttribute(layer, "forward", _forward(layer, weight))


def _forward(layer: Any, weight: PackedWeight) -> Callable[..., Tensor]:
    base = layer.base_layer

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None
        if not args and not kwargs and not torch.is_grad_enabled():
            adapter = _adapter(layer, x)
        if adapter is None or not weight.takes(x, adapter):
            result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
            return result
        return weight(x, base.bias, adapter)

    return forward


def _adapter(layer: Any, x: Tensor) -> Adapter | None:
    """The adapter to add, if nothing else wants the outputs of the products."""
    name = plain_adapter(layer, x)
    if name is None or layer.base_layer._forward_hooks or layer.lora_A[name]._forward_hooks:
        return None
    a = layer.lora_A[name].weight
    b = layer.lora_B[name].weight
    if layer.lora_A[name].bias is not None or not a.is_contiguous() or not b.is_contiguous():
        return None
    return Adapter(a, b, layer.scaling[name])
