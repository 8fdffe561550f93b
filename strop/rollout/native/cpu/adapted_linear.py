"""LoRA layers in decode steps on a CPU: the product of the frozen weight and that of the adapter in one call.

peft computes three products and two sums. With few rows the two products of an adapter take as long as
starting them does, twice for each of the many linear layers of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.changes import Change, SetAttribute
from strop.models.lora import adapted_layers
from strop.models.lora_cpu.layers import plain_adapter
from strop.models.patches import is_chosen
from strop.rollout.native.cpu.packed_linear import PACKED_LINEAR


def adapted_changes(model: nn.Module, weights: Mapping[nn.Module, Any]) -> Iterator[Change]:
    """The forwards of LoRA layers. `weights`: copies of frozen layers that compiled functions multiply."""
    if not is_chosen(model, PACKED_LINEAR):
        return
    for layer in adapted_layers(model):
        weight = weights.get(layer.base_layer)
        if weight is not None and "forward" not in layer.__dict__:
            yield SetAttribute(layer, "forward", _forward(layer, weight))


def _forward(layer: Any, weight: Any) -> Callable[..., Tensor]:
    """`weight`: packed, of any kind; it makes the adapters that it takes."""
    usual = _Usual(layer, weight)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain = not args and not kwargs and not torch.is_grad_enabled() and usual.holds(x)
        if not plain or not weight.takes(x, usual.rank):
            result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
            return result
        return weight(x, usual.base_weights["bias"], usual.adapter)

    return forward


class _Usual:
    """What a LoRA layer adds, and whether it still does. A decode step calls so many layers that looking it
    up in the way of peft takes longer than a small product: it is looked up once per rollout, and each call
    sees whether anything changed."""

    def __init__(self, layer: Any, weight: Any) -> None:
        self._layer = layer
        self._active = list(layer.active_adapters)
        self.base_weights = layer.base_layer._parameters
        name = plain_adapter(layer, layer.base_layer.weight)
        self._known = name is not None
        if name is None:
            return
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        self.adapter = weight.adapter(a, b, layer.scaling[name])
        self.rank = len(a)
        self._name = name
        parts = (layer.base_layer, layer.lora_A[name], layer.lora_B[name])
        self._hooks = [part._forward_hooks for part in parts] + [part._forward_pre_hooks for part in parts]
        whole = a.is_contiguous() and b.is_contiguous()
        self._known = whole and layer.lora_A[name].bias is None

    def holds(self, x: Tensor) -> bool:
        """Whether the layer adds this adapter alone, and nothing else wants the outputs of its products."""
        layer = self._layer
        if not self._known or layer.disable_adapters or layer.merged or any(self._hooks):
            return False
        same = layer.active_adapters == self._active and layer.scaling[self._name] == self.adapter.scale
        return same and not torch.is_autocast_enabled("cpu")
