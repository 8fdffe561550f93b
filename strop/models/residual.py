"""The residual sum of a decoder layer as part of the products that feed it.

A layer adds what its attention and its feed-forward part say to the stream that runs through it. Each of the two ends in a
product, and a product can add to its result what is already there: one pass over memory less, forward and backward, and where
the stream is float32 the branch is never rounded to 16 bits. Done for layers whose code is that of Llama's; weights, names and
the state dict do not change.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def fuse_residual(model: nn.Module) -> None:
    """Let the layers of `model` that can do so add inside their products."""
    for layer in model.modules():
        ends = _ends(layer)
        if ends is not None:
            kind: Any = type(layer)
            layer.__class__ = _fused(kind)
            for end in ends:
                end.__class__ = AddingLinear
            # What the second adds to was made inside the layer.
            cast(AddingLinear, ends[1]).overwrites = True


def _ends(layer: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """The products that end the two branches of a layer, if it is as Llama's and they are plain."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module) or hasattr(type(layer), "adds_in_products"):
        return None
    if "forward" in layer.__dict__ or not _written_as_llama(type(layer)) or {name for name, _ in mlp.named_children()} != _MLP:
        return None
    branch, inner = getattr(attention, "o_proj", None), mlp.down_proj
    if type(branch) is not nn.Linear or type(inner) is not nn.Linear:
        return None
    plain = all(end.bias is None and "forward" not in end.__dict__ for end in (branch, inner))
    return (branch, inner) if plain else None


def _written_as_llama(kind: Any) -> bool:
    llama: Any = LlamaDecoderLayer
    return _body(kind) is not None and _body(kind) == _body(llama)


@cache
def _body(kind: Any) -> str | None:
    """What the forward of this class does, without names of types and comments."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    assert isinstance(function, ast.FunctionDef)
    return ast.dump(ast.Module(function.body, []))


@cache
def _fused(own: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings")
        self.self_attn.o_proj.stream = hidden_states
        normal = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=normal, **dict(zip(names, args)), **kwargs)
        self.mlp.down_proj.stream = hidden_states
        result: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return result

    facts = {"forward": forward, "adds_in_products": True, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (own,), facts)


class AddingLinear(nn.Linear):
    """A product that adds to `stream`, which the layer around it leaves there before every call."""

    stream: Tensor | None = None
    overwrites = False
    """Nobody else reads the stream: without gradients, the sum takes its place in memory."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stream":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, states: Tensor) -> Tensor:
        stream = self.__dict__.pop("stream", None)
        if stream is None or isinstance(self.weight, DTensor) or isinstance(states, DTensor):
            product = super().forward(states)
            return product if stream is None else stream + product
        return add_product(stream, states, self.weight, over=self.overwrites and not torch.is_grad_enabled())


def add_product(stream: Tensor, states: Tensor, weight: Tensor, *, over: bool = False) -> Tensor:
    """stream + states @ weight.T, rounded once, to the dtype of the stream; `over`: in the memory of the stream."""
    rows, wide = states.reshape(-1, states.shape[-1]), stream.reshape(-1, stream.shape[-1])
    if over:
        return _add_over(wide, rows, weight).view(stream.shape)
    if stream.dtype == states.dtype:
        return torch.addmm(wide, rows, weight.t()).view(stream.shape)
    result: Tensor = _AddWide.apply(wide, rows, weight)
    return result.view(stream.shape)


def _add_over(wide: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    if wide.dtype == rows.dtype:
        return wide.addmm_(rows, weight.t())
    if rows.is_cuda:
        return torch.addmm(wide, rows, weight.t(), out_dtype=wide.dtype, out=wide)
    return wide.add_(rows.float() @ weight.t().float())


class _AddWide(torch.autograd.Function):
    """A float32 stream and 16-bit factors."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        if rows.is_cuda:
            return torch.addmm(stream, rows, weight.t(), out_dtype=stream.dtype)
        return stream + rows.float() @ weight.t().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        narrow = above.to(rows.dtype)
        wants_stream, wants_rows, wants_weight = ctx.needs_input_grad
        return (
            above if wants_stream else None,
            narrow @ weight if wants_rows else None,
            narrow.t() @ rows if wants_weight else None,
        )
