"""LoRA layers that take the same states, together: q, k and v, and gate and up. Sampling on a GPU only.

A decode step of a small model spends most of its time on starting kernels, and LoRA triples their number.
Here the frozen weights are one product, and the adapters two kernels for all layers. Each program of the
kernels does what it does for one layer, so the bits are those of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from strop.models.fused_modules import runs_as_kernel
from strop.models.lora_gpu.layers import kernels_of_lora, plain_adapter
from strop.models.projections.divided import LONG, divides_linear
from strop.models.projections.fused import GATE_UP, QKV, Forward, is_whole, side_by_side


class AdaptedProjection:
    """Several LoRA layers as one frozen product and two kernels. Where they do not have one plain adapter
    each, of one rank and scale, every layer computes by itself."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self._sizes = [layer.base_layer.out_features for layer in layers]
        self._adapter: str | None = None
        """Whose weights are laid out."""
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        self.waiting: dict[int, Tensor] = {}
        """Outputs of later layers, from the call of the first layer until they are called themselves."""

    def lay_out(self) -> None:
        """Put the frozen weights, and those of the active adapter, side by side, unless they are."""
        self._adapter = self._common_adapter()
        if self._adapter is None:
            return
        bases = [layer.base_layer for layer in self.layers]
        self._weight = side_by_side([base.weight for base in bases])
        biases = [base.bias for base in bases if base.bias is not None]
        self._bias = side_by_side(biases) if biases else None
        self._a = side_by_side([layer.lora_A[self._adapter].weight for layer in self.layers])
        self._b = side_by_side([layer.lora_B[self._adapter].weight for layer in self.layers])

    def _common_adapter(self) -> str | None:
        """The adapter that all layers add, if its weights can be side by side."""
        weight = self.layers[0].base_layer.weight
        names = {plain_adapter(layer, weight) for layer in self.layers}
        name = names.pop()
        if names or name is None:
            return None
        first = self.layers[0]
        for layer in self.layers:
            whole = type(layer.base_layer) is nn.Linear and is_whole(layer.base_layer)
            factors = (layer.lora_A[name], layer.lora_B[name])
            same_rank = len(factors[0].weight) == len(first.lora_A[name].weight)
            same_scale = layer.scaling[name] == first.scaling[name]
            if not whole or not all(map(is_whole, factors)) or not same_rank or not same_scale:
                return None
        return name

    def first(self, hidden: Tensor) -> Tensor:
        """The output of the first layer; the outputs of the others wait for their calls."""
        self.waiting = {}
        found = self._outputs(hidden)
        if found is None:
            return _alone(self.layers[0], hidden)
        first, *others = found
        self.waiting = dict(enumerate(others, 1))
        return first

    def later(self, place: int) -> Forward:
        """The forward of a later layer: it takes the output that waits."""

        def forward(hidden: Tensor) -> Tensor:
            if place in self.waiting:
                return self.waiting.pop(place)
            return _alone(self.layers[place], hidden)

        return forward

    def _outputs(self, hidden: Tensor) -> Sequence[Tensor] | None:
        """The outputs of all layers; None if the adapters or weights are others than those laid out: rows
        with different adapters, the model without adapters, quantized copies."""
        name = self._adapter
        if name is None or hidden.requires_grad or self._common_adapter() != name:
            return None
        kernels = kernels_of_lora()
        assert kernels is not None and self._weight is not None
        if hidden.dtype != self._weight.dtype:
            return None
        base = F.linear(hidden, self._weight, self._bias)
        scale = self.layers[0].scaling[name]
        whole = kernels.add_lora_to_all(base, hidden, self._a, self._b, scale, self._sizes)
        outputs: Sequence[Tensor] = whole.split(self._sizes, -1)
        return outputs


def _alone(layer: Any, hidden: Tensor) -> Tensor:
    """The layer as its class computes it: its `forward` is that of the projection."""
    out: Tensor = type(layer).forward(layer, hidden)
    return out


def adapted_projections(model: nn.Module) -> Iterator[AdaptedProjection]:
    """The groups of LoRA layers of `model` that can be computed together with the bits that they have
    alone."""
    for part in model.modules():
        children = dict(part.named_children())
        for names in (QKV, GATE_UP):
            layers = [children.get(name) for name in names]
            if names is GATE_UP and not runs_as_kernel(part):  # it calls gate_proj before up_proj
                continue
            if all(layer is not None and _fits(layer) for layer in layers) and _alike(layers):
                yield AdaptedProjection(layers)


def _fits(layer: Any) -> bool:
    """Whether it is a LoRA layer with kernels, whose frozen product has the same bits beside others."""
    if not runs_as_kernel(layer) or not hasattr(layer, "lora_A") or "forward" in layer.__dict__:
        return False
    base = layer.base_layer
    # cuBLAS divides the sums of narrow outputs with long inputs: see projections/divided.py.
    return type(base) is nn.Linear and base.in_features < LONG and not divides_linear(base.weight)


def _alike(layers: Sequence[Any]) -> bool:
    bases = [layer.base_layer for layer in layers]
    inputs = {base.in_features for base in bases}
    biases = {base.bias is None for base in bases}
    return len(inputs) == 1 and len(biases) == 1
