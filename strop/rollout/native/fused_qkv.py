"""Fused q/k/v and gate/up projections: products of the same states with several weights as one product.

A GPU computes one wide matrix product faster than three narrow ones. It needs the weights side by side in
memory: each parameter becomes a view into one tensor, and stays a parameter of its own for the optimizer,
checkpoints and weight sync. Weights are copied once, when they are not side by side yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.models.fused_modules import gated, runs_as_kernel

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FusedForward:
    """A module, the forward that it is to have, and the product behind it: `lay_out` comes before use."""

    module: nn.Module
    forward: Forward
    product: FusedProjection


def fused_forwards(model: nn.Module) -> Iterator[FusedForward]:
    """The forwards of all modules of `model` that can take part in a fused projection."""
    for part in model.modules():
        children = dict(part.named_children())
        if layers := _fusible([children.get(name) for name in _QKV]):
            product = FusedProjection(layers)
            yield FusedForward(layers[0], product.first, product)
            for place, layer in enumerate(layers[1:], 1):
                yield FusedForward(layer, product.later(place), product)
        elif runs_as_kernel(part) and (layers := _fusible([children.get(name) for name in _GATE_UP])):
            product = FusedProjection(layers)
            yield FusedForward(part, _gated_forward(part, product), product)


def _gated_forward(part: nn.Module, product: FusedProjection) -> Forward:
    down = part.down_proj
    assert isinstance(down, nn.Module)

    def forward(hidden: Tensor) -> Tensor:
        gate, up = product(hidden)
        out: Tensor = down(gated(gate, up))
        return out

    return forward


def _fusible(parts: Sequence[nn.Module | None]) -> list[nn.Linear]:
    """These modules, if they are plain layers that take the same states, with whole weights on this
    device."""
    layers = [part for part in parts if type(part) is nn.Linear]
    if len(layers) < len(parts):
        return []
    first = layers[0]
    for layer in layers:
        same_inputs = layer.in_features == first.in_features
        same_bias = (layer.bias is None) == (first.bias is None)
        if not _is_plain(layer) or not same_inputs or not same_bias:
            return []
    return layers


def _is_plain(layer: nn.Linear) -> bool:
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    whole = type(layer.weight) is nn.Parameter and type(layer.weight.data) is Tensor
    return "forward" not in layer.__dict__ and not hooked and whole


class FusedProjection:
    """Several linear layers as one matrix product."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = list(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._weight: Tensor = layers[0].weight.data
        self._bias: Tensor | None = None
        self.waiting: dict[int, Tensor] = {}
        """Outputs of later layers, from the call of the first layer until they are called themselves."""

    def lay_out(self) -> None:
        """Put the weights side by side, unless they are."""
        self._weight = _side_by_side([layer.weight for layer in self._layers])
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        self._bias = _side_by_side(biases) if biases else None

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        return F.linear(hidden, self._weight, self._bias).split(self._sizes, -1)

    def first(self, hidden: Tensor) -> Tensor:
        """The output of the first layer; the outputs of the others wait for their calls."""
        first, *others = self(hidden)
        self.waiting = dict(enumerate(others, 1))
        return first

    def later(self, place: int) -> Forward:
        """The forward of a later layer: it takes the output that waits."""
        return lambda hidden: self.waiting.pop(place)


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """All weights as one tensor over their memory."""
    first = weights[0].data
    address = first.data_ptr()
    together = True
    for weight in weights:
        together &= weight.data_ptr() == address and weight.is_contiguous()
        address += weight.numel() * weight.element_size()
    size = (sum(len(weight) for weight in weights), *first.shape[1:])
    storage = first.untyped_storage()
    if together and storage.data_ptr() + storage.nbytes() >= address:
        return first.as_strided(size, first.stride(), first.storage_offset())
    whole = torch.cat([weight.data for weight in weights])
    for weight, piece in zip(weights, whole.split([len(weight) for weight in weights])):
        weight.data = piece
    return whole
