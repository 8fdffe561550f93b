"""Norms and gated MLPs that also return their output in 8 bits, for the products that follow.

The kernel that computes a row holds all of it, so it can quantise the row as well: the product needs no
further kernel for that. The values are those of formats.quantize_rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.changes import Change, SetAttribute
from strop.models.fused_modules import norm_epsilon, runs_as_kernel
from strop.models.residual import narrows
from strop.rollout.native.quantization.formats import QUANTIZED, Format, QuantizedRows, kernels_for

_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Names of norms before products, in Llama and its relatives."""
_MOST_INPUTS = 16384
"""With more numbers a row does not fit into the registers of one program."""
_NARROW = (torch.bfloat16, torch.float16)


def producers(model: nn.Module, form: Format) -> Iterator[Change]:
    """Changes with which the norms and gated MLPs of `model` quantise what they return. Only modules that run
    as a kernel of Strop's are changed: those were compared with their own forward."""
    kernels = kernels_for(next(model.parameters()).device.type)
    if kernels is None:
        return
    for path, part in model.named_modules():
        if not runs_as_kernel(part) or "forward" in part.__dict__:
            continue
        if path.rsplit(".", 1)[-1] in _NORMS:
            yield SetAttribute(part, "forward", _norm(part, form, kernels))
        elif hasattr(part, "gate_proj"):
            yield SetAttribute(part, "forward", _gated_mlp(part, form, kernels))


def _norm(part: Any, form: Format, kernels: ModuleType) -> Callable[[Tensor], Tensor]:
    plain = type(part).forward

    def forward(hidden: Tensor) -> Tensor:
        weight = part.weight
        dtype = weight.dtype if narrows(part) else torch.promote_types(hidden.dtype, weight.dtype)
        if dtype not in _NARROW or hidden.shape[-1] > _MOST_INPUTS:
            found: Tensor = plain(part, hidden)
            return found
        out = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
        rows = _rows(hidden)
        short = QuantizedRows.room(form, rows)
        kernels.norm_and_quantize(
            rows, weight, norm_epsilon(part), out, short.values, short.scales, form.largest
        )
        setattr(out, QUANTIZED, short)
        return out

    return forward


def _gated_mlp(part: Any, form: Format, kernels: ModuleType) -> Callable[[Tensor], Tensor]:
    plain = type(part).forward

    def forward(hidden: Tensor) -> Tensor:
        if hidden.dtype not in _NARROW or part.down_proj.in_features > _MOST_INPUTS:
            found: Tensor = plain(part, hidden)
            return found
        gate = part.gate_proj(hidden)
        up = part.up_proj(hidden)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        rows = _rows(gate)
        short = QuantizedRows.room(form, rows)
        kernels.gate_and_quantize(rows, _rows(up), out, short.values, short.scales, form.largest)
        setattr(out, QUANTIZED, short)
        result: Tensor = part.down_proj(out)
        return result

    return forward


def _rows(states: Tensor) -> Tensor:
    """[n, size] with neighbours in memory beside each other."""
    rows = states.reshape(-1, states.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
