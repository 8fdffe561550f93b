"""LoRA layers of peft on a GPU: the same bits for any number of rows, and two kernels instead of a dozen.

peft keeps adapters in float32 over a 16-bit model and computes their products in float32, and cuBLAS adds in
an order that depends on the number of rows. So a token had other log-probs in a decode step than in training
(0.003 on average, 0.5 at most, measured on a 0.5B model). The layer keeps its names and weights; whatever is
not a plain LoRA layer with one active adapter computes as in peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.extras import MissingExtra, require
from strop.models.changes import subclass
from strop.models.fused_modules import RUNS_AS_KERNEL
from strop.models.lora import adapted_layers, only_adapter
from strop.models.projections.divided import divides_linear, start_of
from strop.models.residual import add_product

_NARROW = (torch.bfloat16, torch.float16)
_MAX_RANK = 256
"""A program holds 64 rows of this width in its registers."""
_fused_classes: dict[type[nn.Module], type[nn.Module]] = {}


@cache
def kernels_of_lora() -> ModuleType | None:
    try:
        return require("strop.models.lora_gpu.kernels", extra="gpu", why="Fast LoRA on a GPU")
    except MissingExtra:
        return None


def fused_lora_layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """LoRA layers of a model with linear base layers, and the class that each is to have."""
    if kernels_of_lora() is None:
        return
    for layer in adapted_layers(model):
        kind: type[nn.Module] = type(layer)
        is_linear = isinstance(getattr(layer, "base_layer", None), nn.Linear)
        if is_linear and kind.__name__ == "Linear" and "forward" not in layer.__dict__:
            yield layer, _fused_class(kind)


def _fused_class(own: type[nn.Module]) -> type[nn.Module]:
    if own not in _fused_classes:
        _fused_classes[own] = _make_fused_class(own)
    return _fused_classes[own]


def _make_fused_class(own: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None
        if not args and not kwargs:
            name = plain_adapter(self, x)
        if name is None:
            result: Tensor = own.forward(self, x, *args, **kwargs)
            return result
        kernels = kernels_of_lora()
        assert kernels is not None
        a = self.lora_A[name].weight
        b = self.lora_B[name].weight
        total: Tensor = kernels.add_lora(_base(self.base_layer, x), x, a, b, self.scaling[name])
        return total

    return subclass(own, forward, RUNS_AS_KERNEL)


def plain_adapter(layer: Any, x: Tensor) -> str | None:
    """The adapter to add, if it is the only active one and of the ordinary kind."""
    name = only_adapter(layer)
    if name is None or x.dtype not in _NARROW or not x.is_cuda:
        return None
    a = layer.lora_A[name].weight
    if len(a) > _MAX_RANK or isinstance(a, DTensor):
        return None
    return name


def _base(linear: Any, x: Tensor) -> Tensor:
    """The frozen product. Long inner dimensions as models/projections/divided.py computes them."""
    weight = linear.weight
    is_plain = type(linear) is nn.Linear and not isinstance(weight, DTensor) and not weight.requires_grad
    if not is_plain or weight.dtype != x.dtype or not divides_linear(weight):
        result: Tensor = linear(x)
        return result
    rows = x.reshape(-1, x.shape[-1])
    start = start_of(weight, linear.bias, len(rows))
    return add_product(start, rows, weight).to(x.dtype).view(*x.shape[:-1], -1)
