"""Products of the same states with several weights as one product: queries with keys and values, gates with what they open.

A GPU computes one wide product faster than three narrow ones. It needs the weights side by side in memory, so they are laid
there: each parameter becomes a view into one piece, and stays what it is for everybody else. Nothing is copied but once, when
they were found apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.models.parts import gated, runs_as_kernel

_TOGETHER = ("q_proj", "k_proj", "v_proj")
Forward = Callable[..., Tensor]


def joined_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, Forward, Joined]]:
    """Parts of `model` with the forward each is to have, and the product behind it, which must be laid out before use."""
    for part in model.modules():
        children = dict(part.named_children())
        if layers := _alike([children.get(name) for name in _TOGETHER]):
            product = Joined(layers)
            yield layers[0], product.first, product
            for place, layer in enumerate(layers[1:], 1):
                yield layer, product.later(place), product
        elif runs_as_kernel(part) and (layers := _alike([children.get(name) for name in ("gate_proj", "up_proj")])):
            product = Joined(layers)
            yield part, _gated_forward(part, product), product


def _gated_forward(part: nn.Module, product: Joined) -> Forward:
    def forward(hidden: Tensor) -> Tensor:
        out: Tensor = part.down_proj(gated(*product(hidden)))  # type: ignore[operator]
        return out

    return forward


def _alike(parts: Sequence[nn.Module | None]) -> list[nn.Linear]:
    """These parts, if they are plain layers that take the same states, with weights that lie whole on this device."""
    layers = [part for part in parts if type(part) is nn.Linear]
    if len(layers) < len(parts):
        return []
    first = layers[0]
    plain = all(
        "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and type(layer.weight) is nn.Parameter
        and type(layer.weight.data) is Tensor
        and layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        for layer in layers
    )
    return layers if plain else []


class Joined:
    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = list(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._weight: Tensor = layers[0].weight.data
        self._bias: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def lay_out(self) -> None:
        """Put the weights side by side, unless they are."""
        self._weight = _side_by_side([layer.weight for layer in self._layers])
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        self._bias = _side_by_side(biases) if biases else None

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        return F.linear(hidden, self._weight, self._bias).split(self._sizes, -1)

    def first(self, hidden: Tensor) -> Tensor:
        """What the first layer gives; what the others give to the same states waits until they are asked."""
        first, *others = self(hidden)
        self._waiting = dict(enumerate(others, 1))
        return first

    def later(self, place: int) -> Forward:
        return lambda hidden: self._waiting.pop(place)


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """All of them as one tensor over their memory."""
    first = weights[0].data
    at = first.data_ptr()
    together = True
    for weight in weights:
        together &= weight.data_ptr() == at and weight.is_contiguous()
        at += weight.numel() * weight.element_size()
    size = (sum(len(weight) for weight in weights), *first.shape[1:])
    if together and first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() >= at:
        return first.as_strided(size, first.stride(), first.storage_offset())
    whole = torch.cat([weight.data for weight in weights])
    for weight, piece in zip(weights, whole.split([len(weight) for weight in weights])):
        weight.data = piece
    return whole
