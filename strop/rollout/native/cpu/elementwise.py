"""RMS norms, gated activations and rotary embeddings on a CPU (elementwise.c), while the engine samples.

A chain of torch's functions reads and writes the states once for each sum and product, and starting each of
them takes longer than its work on the few rows of a decode step. Modules are found as those of a GPU are
(models/fused_modules.py), and only where the function gives the numbers of the module.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from strop.cpu.compiler import is_arm_linux, load_library
from strop.models.changes import Change, SetAttribute, done
from strop.models.fused_modules import (
    ROTARY,
    Kind,
    Rotate,
    gated_kind,
    gated_twin,
    norm_epsilon,
    norm_kind,
    norm_twin,
)
from strop.models.patches import Patch, PatchContext, SetRotary
from strop.models.self_check import same

Forward = Callable[[Tensor], Tensor]

_LARGE = 1 << 20
"""Numbers of the largest weight of a model for which compiling pays."""
_checked: dict[tuple[Kind, torch.dtype], bool] = {}
"""Whether modules of a kind have the formula in this precision."""


_DTYPES = (torch.float32, torch.bfloat16)


@cache
def _functions(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = None if is_arm_linux() else load_library(Path(__file__).with_suffix(".c"), dtype)
    if library is None:
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    library.strop_rms_norm.argtypes = [*[address] * 3, size, size, ctypes.c_float, ctypes.c_int]
    library.strop_rms_norm.restype = None
    library.strop_gated_silu.argtypes = [*[address] * 3, size, ctypes.c_int]
    library.strop_gated_silu.restype = None
    strides = ctypes.POINTER(size)
    library.strop_rotary.argtypes = [*[address] * 4, *[size] * 4, strides, strides, size, ctypes.c_int]
    library.strop_rotary.restype = None
    return library


def is_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this machine can compile the functions for such numbers."""
    return dtype in _DTYPES and _functions(dtype) is not None


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """hidden / sqrt(mean(hidden^2) + epsilon) * weight."""
    library = _functions(hidden.dtype)
    assert library is not None
    hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    size = hidden.shape[-1]
    rows = hidden.numel() // size
    threads = torch.get_num_threads()
    library.strop_rms_norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, epsilon, threads)
    return out


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    library = _functions(gate.dtype)
    assert library is not None
    gate = gate.contiguous()
    up = up.contiguous()
    out = torch.empty_like(gate)
    threads = torch.get_num_threads()
    library.strop_gated_silu(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), threads)
    return out


def rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """states cos + rotate_half(states) sin: states [batch, heads, length, size], cos and sin [batch or 1,
    length, size]."""
    library = _functions(states.dtype)
    assert library is not None
    cos = cos.contiguous()
    sin = sin.contiguous()
    if states.stride(3) != 1:
        states = states.contiguous()
    out = torch.empty_like(states)
    several = cos.stride(0) if len(cos) > 1 else 0
    library.strop_rotary(
        *(one.data_ptr() for one in (states, cos, sin, out)),
        *states.shape,
        _three(states.stride()),
        _three(out.stride()),
        several,
        torch.get_num_threads(),
    )
    return out


def _three(strides: tuple[int, ...]) -> ctypes.Array[ctypes.c_ssize_t]:
    return (ctypes.c_ssize_t * 3)(*strides[:3])


def _norm_forward(part: nn.Module) -> Forward:
    epsilon = cast(float, norm_epsilon(part))

    def forward(hidden: Tensor) -> Tensor:
        weight = cast(Tensor, part.weight)
        if not _take(hidden, weight) or hidden.shape[-1:] != weight.shape:
            result: Tensor = type(part).forward(part, hidden)
            return result
        return rms_norm(hidden, weight, epsilon)

    return forward


def _gated_forward(part: nn.Module) -> Forward:
    layers = cast(Any, part)

    def forward(hidden: Tensor) -> Tensor:
        gate: Tensor = layers.gate_proj(hidden)
        up: Tensor = layers.up_proj(hidden)
        if _take(gate, up) and gate.shape == up.shape:
            inner = gated_silu(gate, up)
        else:
            inner = layers.act_fn(gate) * up
        out: Tensor = layers.down_proj(inner)
        return out

    return forward


def _take(*given: Tensor) -> bool:
    """Numbers of one precision on the CPU: not DTensors, nor what autograd follows."""
    dtype = given[0].dtype
    if dtype not in _DTYPES or torch.is_grad_enabled():
        return False
    return all(
        type(one) in (Tensor, nn.Parameter) and one.dtype == dtype and one.device.type == "cpu"
        for one in given
    )


def _has_formula(
    kind: Kind,
    part: nn.Module,
    dtype: torch.dtype,
    twin: Callable[..., tuple[nn.Module, int]],
    make: Callable[..., Forward],
) -> bool:
    if (kind, dtype) not in _checked:
        small, size = twin(part, torch.device("cpu"), dtype)
        probe = torch.randn(9, size, generator=torch.Generator().manual_seed(0)).to(dtype)
        with torch.no_grad():
            _checked[kind, dtype] = same(lambda: [small(probe)], lambda: [make(small)(probe)])
    return _checked[kind, dtype]


def _norms(model: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    for part in model.modules():
        kind = norm_kind(part)
        if kind is not None and _has_formula(kind, part, dtype, norm_twin, _norm_forward):
            yield SetAttribute(part, "forward", _norm_forward(part))


def _gated_mlps(model: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    for part in model.modules():
        kind = gated_kind(part)
        if kind is not None and _has_formula(kind, part, dtype, gated_twin, _gated_forward):
            yield SetAttribute(part, "forward", _gated_forward(part))


def _rotations(model: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Models of one family share the function: see SetRotary."""
    for name in sorted({type(part).__module__ for part in model.modules()}):
        own = vars(sys.modules[name]).get(ROTARY)
        if own is None:
            continue
        if hasattr(own, "replaced"):
            yield SetRotary(sys.modules[name], own)
        elif _rotates_alike(own, dtype):
            yield SetRotary(sys.modules[name], _faster_rotate(own))


@cache
def _rotates_alike(own: Rotate, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    given = [torch.randn(*shape, generator=draw).to(dtype) for shape in shapes]
    with torch.no_grad():
        try:
            own(*given)
        except (RuntimeError, TypeError):  # it takes other arguments
            return False
        return same(lambda: own(*given), lambda: _faster_rotate(own)(*given))


def _faster_rotate(own: Rotate) -> Rotate:
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        usual = not more and not options and q.dim() == k.dim() == 4 and cos.dim() == 3
        if not usual or not _take(q, k, cos, sin) or not _rotates(q, cos) or not _rotates(k, cos):
            return own(q, k, cos, sin, *more, **options)
        return rotary(q, cos, sin), rotary(k, cos, sin)

    apply.replaced = own  # type: ignore[attr-defined] # functions take attributes; the stubs do not say so
    return apply


def _rotates(states: Tensor, cos: Tensor) -> bool:
    batch, _, length, size = states.shape
    return cos.shape[0] in (1, batch) and cos.shape[1:] == (length, size) and size % 2 == 0


def _on_cpu(model: nn.Module, context: PatchContext) -> bool:
    large = max(weight.numel() for weight in model.parameters()) >= _LARGE
    return context.device.type == "cpu" and large and is_available(context.dtype)


ELEMENTWISE = (
    Patch("rms_norm_cpu", _on_cpu, lambda model, context: done(_norms(model, context.dtype))),
    Patch("gated_mlp_cpu", _on_cpu, lambda model, context: done(_gated_mlps(model, context.dtype))),
    Patch("rotary_cpu", _on_cpu, lambda model, context: done(_rotations(model, context.dtype))),
)
