"""The residual stream of a decoder: kept in float32, and added to inside matrix products.

`widen_residual`: rounding adds up in the sum that runs through all layers. Every layer rounds it twice, and
two ways to compute the same numbers (one token at a time in the engine, a packed row in the trainer) drift
apart there. In float32 it costs some memory traffic; matrix products, attention and weights stay in 16 bits.

`fused_residual_adds`: the two branches of a layer end in a matrix product, which can add to the stream itself
(addmm). This saves one pass over memory, forward and backward, and a float32 stream gets the branch without a
rounding to 16 bits. Done for layers whose code equals that of Llama's; weights, names and the state dict do
not change.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from strop.models.changes import subclass
from strop.models.projections.divided import add_wide
from strop.models.vision.passes import find_vision_part, towers_of

_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_NARROW = (torch.bfloat16, torch.float16)
Angles = TypeVar("Angles", Tensor, tuple[Tensor, ...])
_bodies: dict[type[nn.Module], str | None] = {}
_adding_layers: dict[type[nn.Module], type[nn.Module]] = {}

# --- a float32 stream ---------------------------------------------------------------------------------------


def widen_residual(model: nn.Module) -> list[RemovableHandle]:
    """Hooks that keep the residual stream in float32: it begins so, and norms return the dtype of their
    weights. Empty where the model cannot do that.

    The hooks look at dtypes when they run: a model in float32 is left alone, also if it is rounded later.
    """
    parts = list(_language_parts(model))
    norms = [part for part in parts if _is_norm(part)]
    rotary = [part for part in parts if type(part).__name__.endswith("RotaryEmbedding")]
    # torch's own layer norm takes no float32 input with 16-bit weights, and a model without rotary angles has
    # learned positions.
    if not norms or not rotary or any(isinstance(part, nn.LayerNorm | nn.GroupNorm) for part in norms):
        return []
    embeddings: nn.Module = cast(Any, model).get_input_embeddings()
    handles = [_begin_wide(model, embeddings)]
    for part in norms:
        handles.append(part.register_forward_hook(_narrow))
    for part in rotary:
        handles.append(part.register_forward_hook(_angles_hook(embeddings)))
    return handles


def _begin_wide(model: nn.Module, embeddings: nn.Module) -> RemovableHandle:
    """Embeddings return float32. With a vision tower, the language model takes float32 instead: before it,
    features are put among the embeddings, and some models round them to the dtype of the weights."""
    part = find_vision_part(model)
    if part is not None:
        for language in part.module.modules():
            if language is not part.module and embeddings in language.children():
                return language.register_forward_pre_hook(_widen_embeddings, with_kwargs=True)
    return embeddings.register_forward_hook(_widen)


def _language_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model without those of its vision tower, whose stream is its own."""
    inside = {part for tower in towers_of(model) for part in tower.modules()}
    return (part for part in model.modules() if part not in inside)


class ResidualHooks:
    """Forward hooks that keep the residual stream in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.handles: list[RemovableHandle] = []

    def do(self) -> None:
        model = self._model()
        assert model is not None
        self.handles = widen_residual(model)

    def undo(self) -> None:
        for handle in self.handles:
            handle.remove()

    def can_undo(self) -> bool:
        return True


def _is_norm(part: nn.Module) -> bool:
    return "Norm" in type(part).__name__ and isinstance(getattr(part, "weight", None), Tensor)


def narrows(part: nn.Module) -> bool:
    """Whether this module takes float32 and returns the dtype of its weights."""
    return _narrow in part._forward_hooks.values()


def _widen(module: nn.Module, _: object, output: Tensor) -> Tensor:
    if output.dtype in _NARROW:
        return output.float()
    return output


def _widen_embeddings(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "inputs_embeds": _widen(module, args, kwargs["inputs_embeds"])}


def _narrow(module: nn.Module, _: object, output: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if output.dtype == torch.float32 and weight.dtype in _NARROW:
        return output.to(weight.dtype)
    return output


def _angles_hook(embeddings: nn.Module) -> Any:
    """Models compute rotary angles in the dtype of the stream; queries and keys have that of the weights."""

    def hook(_: nn.Module, __: object, angles: Angles) -> Angles:
        dtype = cast(Tensor, embeddings.weight).dtype
        if dtype not in _NARROW:
            return angles
        return _angles(angles, dtype)

    return hook


def _angles(angles: Any, dtype: torch.dtype) -> Any:
    if isinstance(angles, Tensor):
        return angles.to(dtype) if angles.is_floating_point() else angles
    return tuple(_angles(part, dtype) for part in angles)


# --- sums inside products -----------------------------------------------------------------------------------


def fused_residual_adds(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Linear, nn.Linear]]:
    """Layers of `model` that can add inside their products, with the products that end their two branches."""
    for layer in model.modules():
        ends = _ends(layer)
        if ends is not None:
            yield layer, *ends


def _ends(layer: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """The products that end the two branches of a layer, if its code is Llama's and they are plain."""
    attention = getattr(layer, "self_attn", None)
    mlp = getattr(layer, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
        return None
    if hasattr(type(layer), "adds_in_products") or "forward" in layer.__dict__:
        return None
    if not _written_as_llama(type(layer)) or {name for name, _ in mlp.named_children()} != _MLP:
        return None
    branch = getattr(attention, "o_proj", None)
    inner = mlp.down_proj
    if not _is_plain(branch) or not _is_plain(inner):
        return None
    return cast(nn.Linear, branch), cast(nn.Linear, inner)


def _is_plain(end: object) -> bool:
    return type(end) is nn.Linear and end.bias is None and "forward" not in end.__dict__


def _written_as_llama(kind: type[nn.Module]) -> bool:
    return _body(kind) is not None and _body(kind) == _body(LlamaDecoderLayer)


def _body(kind: type[nn.Module]) -> str | None:
    """What the forward of this class does, without names of types, comments and docstring."""
    if kind not in _bodies:
        _bodies[kind] = _parsed_body(kind)
    return _bodies[kind]


def _parsed_body(kind: type[nn.Module]) -> str | None:
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return ast.dump(ast.Module(body, []))


def adding_layer(own: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a decoder layer that gives the stream to the products that end its branches."""
    if own not in _adding_layers:
        _adding_layers[own] = _make_adding_layer(own)
    return _adding_layers[own]


def _make_adding_layer(own: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        names = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings")
        self.self_attn.o_proj.stream = hidden_states
        normal = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=normal, **dict(zip(names, args)), **kwargs)
        self.mlp.down_proj.stream = hidden_states
        result: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return result

    return subclass(own, forward, "adds_in_products")


class AddingLinear(nn.Linear):
    """A product that adds to `stream`, which the layer around it sets before every call."""

    stream: Tensor | None = None
    overwrites = False
    """No other module reads the stream: without gradients, the sum is written over it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stream":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, states: Tensor) -> Tensor:
        stream = self.__dict__.pop("stream", None)
        if stream is None:
            return super().forward(states)
        if isinstance(self.weight, DTensor) or isinstance(states, DTensor):
            total: Tensor = stream + super().forward(states)
            return total
        in_place = self.overwrites and not torch.is_grad_enabled()
        return add_product(stream, states, self.weight, in_place=in_place)


def add_product(stream: Tensor, states: Tensor, weight: Tensor, *, in_place: bool = False) -> Tensor:
    """stream + states @ weight.T in the dtype of the stream; `in_place`: in its memory."""
    rows = states.reshape(-1, states.shape[-1])
    wide = stream.reshape(-1, stream.shape[-1])
    if in_place:
        return _add_in_place(wide, rows, weight).view(stream.shape)
    if stream.dtype == states.dtype:
        return torch.addmm(wide, rows, weight.t()).view(stream.shape)
    result: Tensor = _AddWide.apply(wide, rows, weight)
    return result.view(stream.shape)


def _add_in_place(wide: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    if wide.dtype == rows.dtype:
        return wide.addmm_(rows, weight.t())
    if rows.is_cuda:
        return add_wide(wide, rows, weight, in_place=True)
    return wide.add_(rows.float() @ weight.t().float())


class _AddWide(torch.autograd.Function):
    """A float32 stream and 16-bit factors."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        if rows.is_cuda:
            return add_wide(stream, rows, weight)
        return stream + rows.float() @ weight.t().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        narrow = above.to(rows.dtype)
        wants_stream, wants_rows, wants_weight = ctx.needs_input_grad
        return (
            above if wants_stream else None,
            narrow @ weight if wants_rows else None,
            narrow.t() @ rows if wants_weight else None,
        )
