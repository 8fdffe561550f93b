"""LoRA layers of peft on a CPU: the scaled product of an adapter is added to the frozen one by the product.

peft scales B A x and adds it in operations of their own. On a CPU these read and write whole layer outputs
in memory, forward and backward, and in a decode step each takes as long as a small product. The layer keeps
its names and weights; whatever is not a plain LoRA layer with one active adapter computes as in peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        first = self.lora_A[name]
        b = self.lora_B[name].weight
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and _is_simple(self.base_layer, first):
            base = self.base_layer
            flat = _AdaptedLinear.apply(rows, base.weight, base.bias, first.weight, b, self.scaling[name])
            return flat.view(*x.shape[:-1], len(b))
        flat = self.base_layer(rows)
        low = first(rows)
        if torch.is_grad_enabled():
            flat = torch.addmm(flat, low, b.t(), alpha=self.scaling[name])
        else:
            flat.addmm_(low, b.t(), alpha=self.scaling[name])
        return flat.view(*x.shape[:-1], len(b))

    return subclass(own, forward, _LEAN)


def _is_simple(base: nn.Module, first: nn.Linear) -> bool:
    """Whether the products of a layer are nothing else: a frozen linear layer, and no hooks."""
    if type(base) is not nn.Linear or base.weight.requires_grad or "forward" in base.__dict__:
        return False
    if base.bias is not None and base.bias.requires_grad:
        return False
    hooks = (base._forward_hooks, base._forward_pre_hooks, first._forward_hooks, first._forward_pre_hooks)
    return not any(hooks) and first.bias is None


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + bias + scale (x A^T) B^T with frozen W and bias. Forward and backward add the part of the
    adapter in place; autograd would write it, and its gradient, to memory of their own first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        out = F.linear(x, weight, bias)
        low = x @ a.t()
        out.addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, low, weight, a, b = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, _ = ctx.needs_input_grad
        # A wide product with few outputs reads its weights in order only if they are [few, wide] in memory.
        grad_low = F.linear(gradient, b.t().contiguous()).mul_(ctx.scale)
        grad_x = None
        grad_a = None
        grad_b = None
        if needs_x:
            grad_x = (gradient @ weight).addmm_(grad_low, a)
        if needs_a:
            grad_a = grad_low.t() @ x
        if needs_b:
            grad_b = (low.t() @ gradient).mul_(ctx.scale).t().contiguous()
        return grad_x, None, None, grad_a, grad_b, None


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
