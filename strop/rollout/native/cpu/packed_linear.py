"""Copies of linear weights for decode steps on a CPU.

A matrix product with few rows, as in every decode step, spends much of its time on bringing the weights into
the layout of its inner loop: that of few_rows.c where the machine has a compiler and AVX-512 or NEON, that of
few_rows_bf16.c for bf16 with AMX, otherwise that of oneDNN. Doing so once costs about as much as two to five
steps save, so it is done before the first step if a response may become long, otherwise when a rollout has
gone on for a while under the same weights. Weights that are not trained (those under LoRA adapters) are
copied before the first step, and the copies stay: see frozen_weights.py. All this depends on counts alone,
never on a clock: a run must be repeatable to the bit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.host import host_memory
from strop.models.changes import Change, SetAttribute, done
from strop.models.nf4.layers import Nf4Linear, dense_weight
from strop.models.patches import Patch, PatchContext, always, is_chosen
from strop.rollout.native.cpu.few_rows import PackedWeight, packed_weight
from strop.rollout.native.cpu.few_rows_bf16 import PackedBf16Weight, packed_bf16_weight
from strop.rollout.native.cpu.frozen_weights import FrozenLinear

STEPS = 4
"""Decode steps after which packing pays."""
LONG = 32
"""Packing pays at once if a response may have so many more tokens."""
FEW = 256
"""With more rows the plain product is as fast."""
_SMALLEST = 1 << 16
"""Weights of the smallest layer that is worth it."""
_HOST_SHARE = 8
"""The copies may take this part of the host's memory."""


def _packed_linear(model: nn.Module, context: PatchContext) -> list[Change]:
    layers = [layer for layer in model.modules() if _worth_it(layer)]
    dtype = next(model.parameters()).dtype
    quantized = [
        layer for layer in model.modules() if isinstance(layer, Nf4Linear) and not layer.weight.is_cuda
    ]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    size += sum(layer.in_features * layer.out_features * dtype.itemsize for layer in quantized)
    if not _fits(size):
        return []
    changes = done(SetAttribute(layer, "forward", _packed(layer)) for layer in layers)
    return changes + done(SetAttribute(layer, "forward", _dequantized(layer, dtype)) for layer in quantized)


def _fits(size: int) -> bool:
    """Whether copies of so many bytes are small beside the host's memory."""
    return size * _HOST_SHARE <= host_memory()


PACKED_LINEAR = Patch("packed_linear", always, _packed_linear)


def find_frozen(model: nn.Module) -> list[FrozenLinear]:
    """Layers whose weights are not trained, for copies that stay; none if the copies are too large."""
    layers = []
    if is_chosen(model, PACKED_LINEAR):
        layers = [layer for layer in model.modules() if _is_frozen(layer)]
    if not _fits(sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)):
        return []
    return [FrozenLinear(layer, _packed) for layer in layers]


def refreshed(frozen: Iterable[FrozenLinear]) -> list[FrozenLinear]:
    """Those that are still frozen, with copies of the weights that they have now."""
    kept = [one for one in frozen if _is_frozen(one.layer)]
    for one in kept:
        one.refresh()
    return kept


def compiled_weights(frozen: Iterable[FrozenLinear]) -> dict[nn.Module, PackedWeight | PackedBf16Weight]:
    """Of the copies of frozen layers, those that compiled functions multiply."""
    return {one.layer: one.forward.packed_weight for one in frozen if isinstance(one.forward, CompiledLinear)}


def _is_frozen(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return _worth_it(layer) and not layer.weight.requires_grad


def _worth_it(layer: nn.Module) -> TypeGuard[nn.Linear]:
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    weight = layer.weight
    on_cpu = type(weight) is nn.Parameter and weight.device.type == "cpu"
    return on_cpu and weight.numel() >= _SMALLEST and _faster(weight.dtype)


def _faster(dtype: torch.dtype) -> bool:
    """Where packed products were measured to win (float32 on Arm and with AVX-512) or skip a copy of the
    weights per call (bf16 units)."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    is_arm = platform.machine() in ("aarch64", "arm64")
    return dtype == torch.float32 and (is_arm or torch.backends.cpu.get_cpu_capability() == "AVX512")


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    compiled = packed_weight(layer.weight) or packed_bf16_weight(layer.weight)
    if compiled is not None:
        return CompiledLinear(layer, compiled)
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), FEW // 4)

    def forward(hidden: Tensor) -> Tensor:
        if hidden.numel() == hidden.shape[-1]:  # a single row reads the weights once either way
            return F.linear(hidden, layer.weight, layer.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, layer.bias, "none", [], "")
        return out

    return forward


class CompiledLinear:
    """A linear layer computed with few_rows.c or few_rows_bf16.c, if it has few rows."""

    def __init__(self, layer: nn.Linear, packed_weight: PackedWeight | PackedBf16Weight) -> None:
        self._layer = layer
        self.packed_weight = packed_weight

    def __call__(self, hidden: Tensor) -> Tensor:
        if not self.packed_weight.takes(hidden):
            return F.linear(hidden, self._layer.weight, self._layer.bias)
        return self.packed_weight(hidden, self._layer.bias)


def _dequantized(layer: Nf4Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = dense_weight(layer, dtype)
    return lambda hidden: F.linear(hidden, weight, layer.bias)
