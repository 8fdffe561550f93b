"""LoRA layers of peft on a CPU: the scaled product of an adapter is added to the frozen one by the product.

peft scales B A x and adds it in operations of their own. On a CPU these read and write whole layer outputs
in memory, forward and backward, and in a decode step each takes as long as a small product. The layer keeps
its names and weights; whatever is not a plain LoRA layer with one active adapter computes as in peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.changes import subclass
from strop.models.lora import adapted_layers, only_adapter

_LEAN = "adds_in_product"
_lean_classes: dict[type[nn.Module], type[nn.Module]] = {}


def lean_lora_layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """LoRA layers of a model with linear base layers, and the class that each is to have."""
    for layer in adapted_layers(model):
        kind: type[nn.Module] = type(layer)
        is_linear = isinstance(getattr(layer, "base_layer", None), nn.Linear)
        if is_linear and kind.__name__ == "Linear" and "forward" not in layer.__dict__:
            if kind not in _lean_classes:
                _lean_classes[kind] = _make_lean_class(kind)
            yield layer, _lean_classes[kind]


def _make_lean_class(own: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None
        if not args and not kwargs:
            name = plain_adapter(self, x)
        if name is None:
            result: Tensor = own.forward(self, x, *args, **kwargs)
            return result
        b = self.lora_B[name].weight
        rows = x.reshape(-1, x.shape[-1])
        # Of rows [n, in] the frozen product is a tensor of its own, not a view: nobody keeps it, so the
        # product of the adapter is added in place, with gradients too.
        flat: Tensor = self.base_layer(rows)
        low = self.lora_A[name](rows)
        if torch.is_grad_enabled() and type(self.base_layer) is not nn.Linear:
            flat = torch.addmm(flat, low, b.t(), alpha=self.scaling[name])
        else:
            flat.addmm_(low, b.t(), alpha=self.scaling[name])
        return flat.view(*x.shape[:-1], len(b))

    return subclass(own, forward, _LEAN)


def plain_adapter(layer: Any, x: Tensor) -> str | None:
    """The adapter to add, if all is in one precision on the CPU."""
    name = only_adapter(layer)
    if name is None or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    b = layer.lora_B[name].weight
    # 4-bit weights have another dtype, and their products that of the states.
    weight = layer.base_layer.weight
    same = x.dtype == b.dtype and weight.dtype in (b.dtype, torch.uint8)
    if not same or isinstance(b, DTensor):
        return None
    return name
