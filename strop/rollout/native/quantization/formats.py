"""Matrices in 8 bits with one scale per row, and products of them.

Weights have one scale per output, states one scale per token. So what a token gets does not depend on the
other tokens of the batch, and the scales leave the sum over the inputs: a product of 8-bit numbers is
computed first and scaled once. On a GPU, Triton kernels (kernels.py) quantise; plain torch computes the same
numbers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from strop.extras import MissingExtra, require
from strop.registry import did_you_mean

_SMALLEST = 1e-12
"""The least scale: rows of zeros stay zeros."""
_MOST_INPUTS = 32768
"""With more inputs a row does not fit into one program of the kernel; plain torch quantises it."""
_FEWEST_ROWS = 32
"""An int8 product on a GPU needs more than 16 rows."""
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Format:
    """What 8 bits mean."""

    name: str
    dtype: torch.dtype
    largest: float
    """The largest value."""
    multiple: int
    """The numbers of inputs and outputs of a product must be multiples of this."""


FP8 = Format("fp8", torch.float8_e4m3fn, 448.0, 16)
INT8 = Format("int8", torch.int8, 127.0, 8)
FORMATS = {form.name: form for form in (FP8, INT8)}


def format_for(name: str, device: torch.device) -> Format:
    """The format of rollout.quantization, if this device can compute with it."""
    if name not in FORMATS:
        raise ValueError(
            f"rollout.quantization={name!r} must be {' or '.join(FORMATS)} with the native engine."
            f"{did_you_mean(name, list(FORMATS))}"
        )
    form = FORMATS[name]
    if form is FP8 and device.type != "cuda":
        raise ValueError(
            f"rollout.quantization=fp8 needs a GPU with compute capability 8.9 or more, but the model is on "
            f"{device.type}. Set rollout.quantization=int8 or null."
        )
    if form is FP8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"rollout.quantization=fp8 needs a GPU with compute capability 8.9 or more; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}. Set "
            "rollout.quantization=int8 or null."
        )
    if form is INT8 and not _int8_is_exact(device.type):
        raise ValueError(
            "rollout.quantization=int8: torch multiplies 8-bit integers with overflows on this processor. "
            "Set rollout.quantization=null."
        )
    return form


@cache
def _int8_is_exact(device: str) -> bool:
    """Whether the largest sums are right: some processors add pairs of products in 16 bits."""
    rows = torch.full((_FEWEST_ROWS, 256), -127, dtype=torch.int8, device=device)
    weight = torch.full((64, 256), 127, dtype=torch.int8, device=device)
    return bool((torch._int_mm(rows, weight.t()) == -127 * 127 * 256).all())


@cache
def _kernels(device: str) -> ModuleType | None:
    if device != "cuda":
        return None
    try:
        return require("strop.rollout.native.quantization.kernels", extra="gpu", why="rollout.quantization")
    except MissingExtra as error:
        warnings.warn(f"{error} Plain torch quantises, which is several times slower.", stacklevel=2)
        return None


# --- quantising ---------------------------------------------------------------------------------------------


def quantize_rows(form: Format, rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write rows [n, inputs] as 8-bit `values` [n, inputs] and `scales` [n], with rows = values * scales.

    A row with a NaN or an infinity gets the scale NaN, so that the product is NaN in every format.
    """
    kernels = _kernels(rows.device.type)
    if kernels is not None and rows.shape[1] <= _MOST_INPUTS:
        kernels.quantize_rows(rows, values, scales, form.largest)
        return
    plain_values, plain_scales = plain_quantize_rows(form, rows)
    values.copy_(plain_values)
    scales.copy_(plain_scales)


def plain_quantize_rows(form: Format, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch: values and scales."""
    wide = rows.float()
    low, high = wide.aminmax(dim=1)
    most = torch.maximum(high, -low)
    # On a GPU torch divides by a Python number through its reciprocal, which rounds twice.
    largest = torch.full((), form.largest, dtype=most.dtype, device=most.device)
    scales = (most / largest).clamp(min=_SMALLEST)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    ratio = wide / scales[:, None]
    if not form.dtype.is_floating_point:
        ratio = (ratio + 0.5).floor_()
    return ratio.to(form.dtype), scales


# --- products -----------------------------------------------------------------------------------------------


def product(form: Format, states: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """states [..., inputs] times a weight of 8-bit values [outputs, inputs] and scales [outputs], in the
    dtype of the states."""
    rows = states.reshape(-1, states.shape[-1])
    if form is FP8:
        out = _fp8_product(rows, values, scales, bias)
    else:
        out = _int8_product(rows, values, scales, bias)
    return out.view(*states.shape[:-1], len(values))


def _quantized(form: Format, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and scales of `rows`, with room for `count` rows. What follows after the rows is not set."""
    values = torch.empty(count, rows.shape[1], dtype=form.dtype, device=rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    quantize_rows(form, rows, values[: len(rows)], scales[: len(rows)])
    return values, scales


def _fp8_product(rows: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    left, left_scales = _quantized(FP8, rows, len(rows))
    fits = bias is not None and bias.dtype == torch.bfloat16
    out = torch._scaled_mm(
        left,
        values.t(),
        scale_a=left_scales[:, None],
        scale_b=scales[None, :],
        bias=bias if fits else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if bias is not None and not fits:
        out = out + bias
    return out.to(rows.dtype)


def _int8_product(rows: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    count = len(rows)
    kernels = _kernels(rows.device.type)
    if rows.device.type == "cuda":
        count = max(_FEWEST_ROWS, -(-count // INT8.multiple) * INT8.multiple)
    left, left_scales = _quantized(INT8, rows, count)
    sums = torch._int_mm(left, values.t())[: len(rows)]
    left_scales = left_scales[: len(rows)]
    if kernels is not None:
        scaled: Tensor = kernels.scale_sums(sums, left_scales, scales, bias, rows.dtype)
        return scaled
    out = sums.float().mul_(left_scales[:, None]).mul_(scales)
    if bias is not None:
        out += bias
    return out.to(rows.dtype)
