"""Linear layers whose frozen weight is stored in NF4.

A layer keeps its place, name and sizes, so adapters of peft are added to it as to any other. Its `weight`
becomes bytes [outputs, inputs / 2], and `scales` is a buffer. Each pass dequantises the weights of one layer
after another in the precision of its input, multiplies as `nn.Linear` does, and frees them; the backward pass
dequantises again. So sampling and training compute with the same numbers, and memory holds one dequantised
matrix at a time.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from strop.extras import MissingExtra, require
from strop.models.nf4.format import LEVELS, dequantize, fits, quantize
from strop.models.projections import divided

log = logging.getLogger(__name__)


class Nf4Linear(nn.Linear):
    """A linear layer with a weight in NF4."""

    scales: Tensor

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = _Product.apply(states, self.weight, self.scales, self.bias)
        return product

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nf4"


class _Product(torch.autograd.Function):
    """states @ weight.T + bias, with a gradient of the states and of the bias."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.scales = scales  # a buffer, which must not be offloaded as an activation
        weight = _dense(packed, scales, states.dtype)
        if states.is_cuda and states.dtype in (torch.bfloat16, torch.float16):
            return divided.linear(states, weight, bias)
        return F.linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        (packed,) = ctx.saved_tensors
        scales = ctx.scales
        to_states = None
        to_bias = None
        if ctx.needs_input_grad[0]:
            to_states = above @ _dense(packed, scales, above.dtype)
        if ctx.needs_input_grad[3]:
            to_bias = above.reshape(-1, above.shape[-1]).sum(0)
        return to_states, None, None, to_bias


def _dense(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    kernel = None
    if packed.is_cuda:
        kernel = _kernel()
    if kernel is None:
        return dequantize(packed, scales, dtype)
    return cast(Tensor, kernel.dequantize(packed, scales, _levels(packed.device), dtype))


@cache
def _kernel() -> ModuleType | None:
    try:
        return require("strop.models.nf4.kernel", extra="gpu", why="Fast 4-bit weights on a GPU")
    except MissingExtra as error:
        log.warning("%s 4-bit weights are dequantised by plain torch, which is slower.", error)
        return None


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def dense_weight(layer: Nf4Linear, dtype: torch.dtype) -> Tensor:
    """The weight of a layer as it computes with it."""
    return _dense(layer.weight.detach(), layer.scales, dtype)


# --- models -------------------------------------------------------------------------------------------------


def quantize_layers(model: nn.Module, decoder: nn.Module, device: torch.device | None = None) -> None:
    """Store the linear layers of `decoder`, a part of `model`, in NF4. `device`: where to compute, layer by
    layer.

    Embeddings, norms, the output head, experts in one tensor and matrices whose rows are not whole blocks are
    not changed.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    stored = 0
    for layer in decoder.modules():
        if type(layer) is nn.Linear and layer is not head and fits(layer.weight):
            stored += layer.weight.numel()
            _quantize(layer, device)
    rest = sum(weight.numel() for weight in model.parameters() if weight.is_floating_point())
    if not stored:
        raise ValueError(
            f"model.quantization=nf4: {type(model).__name__} has no linear layer whose number of inputs is a "
            "multiple of 64, so nothing would be quantised. Leave model.quantization out."
        )
    log.info(
        "model.quantization=nf4: %.1f%% of the weights are stored in 4 bits; %.2f GB stay in full precision.",
        100 * stored / (stored + rest),
        sum(w.numel() * w.element_size() for w in model.parameters() if w.is_floating_point()) / 1e9,
    )


def _quantize(layer: nn.Linear, device: torch.device | None) -> None:
    home = layer.weight.device
    packed, scales = quantize(layer.weight.detach().to(device or home))
    layer.weight = nn.Parameter(packed.to(home), requires_grad=False)
    layer.register_buffer("scales", scales.to(home), persistent=False)  # no part of an exported model
    layer.__class__ = Nf4Linear


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all layers plain weights again: what they computed with."""
    for layer in model.modules():
        if isinstance(layer, Nf4Linear):
            layer.weight = nn.Parameter(dense_weight(layer, dtype), requires_grad=False)
            del layer.scales
            layer.__class__ = nn.Linear  # type: ignore[assignment] # the reverse of _quantize


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer of a model is stored in NF4."""
    return any(isinstance(layer, Nf4Linear) for layer in model.modules())
