"""Products of the same states with several weights as one product: q/k/v, and gate and up.

A GPU computes one wide matrix product faster than three narrow ones. It needs the weights side by side in
memory: each parameter becomes a view into one tensor, and stays a parameter of its own for the optimizer,
checkpoints and weight sync. Weights are copied once, when they are not side by side yet.

The rollout engine uses `fused_forwards` (rollout/native/borrowed_model.py). Training computes keys and values
by products of their own, which have the same bits unless their inputs are long and their outputs few (keys of
a 7B model: 3,584 and 512): cuBLAS then divides the sums, see divided.py. Such layers are fused in training
too, as `FusedQkvLinear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from strop.models.changes import Change, SetAttribute, SetClass
from strop.models.fused_modules import runs_as_kernel
from strop.models.projections import few_rows
from strop.models.projections.divided import LONG

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
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
        layers = _fusible([children.get(name) for name in QKV])
        if not layers and runs_as_kernel(part):  # it calls gate_proj before up_proj
            layers = _fusible([children.get(name) for name in GATE_UP])
        if not layers:
            continue
        product = FusedProjection(layers)
        yield FusedForward(layers[0], product.first, product)
        for place, layer in enumerate(layers[1:], 1):
            yield FusedForward(layer, product.later(place), product)


def _fusible(parts: Sequence[nn.Module | None]) -> list[nn.Linear]:
    """These modules, if they are plain layers that take the same states, with whole weights on this
    device."""
    plain = (nn.Linear, FusedQkvLinear)
    layers = [part for part in parts if isinstance(part, nn.Linear) and type(part) in plain]
    if len(layers) < len(parts):
        return []
    first = layers[0]
    for layer in layers:
        same_inputs = layer.in_features == first.in_features
        same_bias = (layer.bias is None) == (first.bias is None)
        if not is_whole(layer) or not same_inputs or not same_bias:
            return []
    return layers


def is_whole(layer: nn.Linear) -> bool:
    """Whether a layer is computed by its own class from its own weights, all of which are here."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    whole = type(layer.weight) is nn.Parameter and type(layer.weight.data) is Tensor
    return "forward" not in layer.__dict__ and not hooked and whole


class FusedProjection:
    """Several linear layers as one matrix product."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._weight: Tensor = layers[0].weight.data
        self._bias: Tensor | None = None
        self.waiting: dict[int, Tensor] = {}
        """Outputs of later layers, from the call of the first layer until they are called themselves."""
        self.multiply: Callable[[Tensor, Tensor | None], Tensor] | None = None
        """Multiplies states with the weights and adds the bias; None: with the weights as they are."""

    def whole_weight(self) -> Tensor:
        """The weights of all layers, one below the other."""
        self.lay_out()
        return self._weight

    def lay_out(self) -> None:
        """Put the weights side by side, unless they are."""
        self._weight = side_by_side([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        self._bias = side_by_side(biases) if biases else None

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        if self.multiply is not None:
            return self.multiply(hidden, self._bias).split(self._sizes, -1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self._bias is None and few_rows.takes(rows, self._weight):
            product = few_rows.product(rows, self._weight).view(*hidden.shape[:-1], -1)
            return product.split(self._sizes, -1)
        return F.linear(hidden, self._weight, self._bias).split(self._sizes, -1)

    def first(self, hidden: Tensor) -> Tensor:
        """The output of the first layer; the outputs of the others wait for their calls."""
        first, *others = self(hidden)
        self.waiting = dict(enumerate(others, 1))
        return first

    def later(self, place: int) -> Forward:
        """The forward of a later layer: it takes the output that waits."""
        return lambda hidden: self.waiting.pop(place)


def side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """All weights as one tensor over their memory; they are moved there if they are not side by side."""
    found = _adjacent(weights)
    if found is not None:
        return found
    whole = torch.cat([weight.data for weight in weights])
    for weight, piece in zip(weights, whole.split([len(weight) for weight in weights])):
        weight.data = piece
    return whole


def _adjacent(weights: Sequence[Tensor]) -> Tensor | None:
    """All weights as one tensor, if they are side by side in memory."""
    first = weights[0].data
    address = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return None
        address += weight.numel() * weight.element_size()
    storage = first.untyped_storage()
    if storage.data_ptr() + storage.nbytes() < address:
        return None
    size = (sum(len(weight) for weight in weights), *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset())


# --- in training --------------------------------------------------------------------------------------------


def fused_qkv_layers(model: nn.Module) -> Iterator[Change]:
    """Changes that make training compute q, k and v in one product where three would have other bits."""
    for part in model.modules():
        children = dict(part.named_children())
        layers = _fusible([children.get(name) for name in QKV])
        if not layers or layers[0].in_features < LONG:
            continue
        product = FusedQkv(layers)
        for place, layer in enumerate(layers):
            yield SetAttribute(layer, "product", product)
            yield SetAttribute(layer, "place", place)
            yield SetClass(layer, FusedQkvLinear)


class FusedQkvLinear(nn.Linear):
    """A q, k or v projection that is computed together with the other two; trains."""

    product: FusedQkv
    place: int

    def forward(self, states: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor) or states.dtype != self.weight.dtype:
            return super().forward(states)
        return self.product.output(self.place, states)


class FusedQkv:
    """The product of q, k and v. The call of one layer computes all; the outputs of the others wait."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = list(layers)
        self._states: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def output(self, place: int, states: Tensor) -> Tensor:
        if self._states is not states or place not in self._waiting:
            self._waiting = {}  # of a pass that failed: it must not hold memory while this one computes
            self._waiting = dict(enumerate(self._outputs(states)))
            self._states = states
        found = self._waiting.pop(place)
        if not self._waiting:
            self._states = None
        return found

    def _outputs(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = [layer.weight for layer in self._layers]
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        rows = states.reshape(-1, states.shape[-1])
        whole: Tensor = _FusedProduct.apply(rows, len(weights), *weights, *biases)
        q, k, v = whole.view(*states.shape[:-1], -1).split([len(weight) for weight in weights], -1)
        # Attention saves v for its gradient; as a view it would keep q and k as well.
        return q, k, v.contiguous()


class _FusedProduct(torch.autograd.Function):
    """rows @ weights.T + biases. The weights are saved as they are, not as one copy: FSDP frees them between
    forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, *parts: Tensor) -> Tensor:
        weights, biases = parts[:count], parts[count:]
        ctx.save_for_backward(rows, *weights)
        return F.linear(rows, _whole(weights), _whole(biases) if biases else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        wants_rows, _, *wants = ctx.needs_input_grad
        found: list[Tensor | None] = [above @ _whole(weights) if wants_rows else None, None]
        sizes = [len(weight) for weight in weights]
        by_weight: Sequence[Tensor | None] = [None] * len(sizes)
        if any(wants[: len(sizes)]):
            by_weight = (above.t() @ rows).split(sizes)
        found += by_weight
        if len(wants) > len(sizes):
            found += above.sum(0).split(sizes)
        return tuple(found)


def _whole(tensors: Sequence[Tensor]) -> Tensor:
    """Weights or biases as one tensor, copied where they are not side by side."""
    found = _adjacent(tensors)
    return torch.cat(list(tensors)) if found is None else found
