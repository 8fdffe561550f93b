"""Linear layers on a CPU with their weights in the layout that oneDNN computes with.

A matrix product spends a good part of its time on bringing the weights into shape when it has few rows, as every decode step
does. Doing so once costs about as much as a few steps, so it is done when a rollout has gone on for a while under the same
weights. When it is done depends on counts alone, never on a clock: a run must be repeatable to the bit.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STEPS = 8
"""Decode steps after which packing pays."""
_FEW = 256
"""With more rows the plain product is as fast."""
_SMALLEST = 1 << 16
"""Weights of the smallest layer that is worth it."""
_HOST_SHARE = 8
"""The copies may take this part of the host's memory."""


class Packed:
    """The layers of one module; `put_on` and `take_off` bracket each loan, `drop` forgets copies of weights that changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        self._steps = 0

    def stepped(self, rows: int) -> None:
        """A decode step of so many rows was computed."""
        if rows <= _FEW:
            self._steps += 1
            if self._steps == _STEPS:
                self._pack()
                self.put_on()

    def put_on(self) -> None:
        for layer, forward in self._forwards:
            layer.forward = forward

    def take_off(self) -> None:
        for layer, _ in self._forwards:
            layer.__dict__.pop("forward", None)

    def drop(self) -> None:
        self.take_off()
        self._forwards, self._steps = [], 0

    def _pack(self) -> None:
        layers = [layer for layer in self._model.modules() if _worth_it(layer)]
        size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
        if size * _HOST_SHARE <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            self._forwards = [(layer, _packed(layer)) for layer in layers]


def _worth_it(layer: nn.Module) -> TypeGuard[nn.Linear]:
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    weight = layer.weight
    return (
        type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.numel() >= _SMALLEST and _faster(weight.dtype)
    )


def _faster(dtype: torch.dtype) -> bool:
    """Where packed products were measured to win (float32 on Arm) or skip a copy of the weights per call (bf16 units)."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and platform.machine() in ("aarch64", "arm64")


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _FEW // 4)

    def forward(hidden: Tensor) -> Tensor:
        if hidden.numel() == hidden.shape[-1]:
            return F.linear(hidden, layer.weight, layer.bias)  # a single row reads the weights once either way
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, layer.bias, "none", [], "")
        return out

    return forward
