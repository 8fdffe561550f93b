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
def kernels_for(device: str) -> ModuleType | None:
    """kernels.py, on a device that it runs on."""
    if device != "cuda":
        return None
    try:
        return require("strop.rollout.native.quantization.kernels", extra="gpu", why="rollout.quantization")
    except MissingExtra as error:
        warnings.warn(f"{error} Plain torch quantises, which is several times slower.", stacklevel=2)
        return None


@cache
def _adding_product(device: str) -> ModuleType | None:
    if device != "cuda":
        return None
    try:
        return require(
            "strop.rollout.native.quantization.adding_product", extra="gpu", why="rollout.quantization"
        )
    except MissingExtra:
        return None


# --- quantising ---------------------------------------------------------------------------------------------


def quantize_rows(form: Format, rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write rows [n, inputs] as 8-bit `values` [n, inputs] and `scales` [n], with rows = values * scales.

    A row with a NaN or an infinity gets the scale NaN, so that the product is NaN in every format.
    """
    kernels = kernels_for(rows.device.type)
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


@dataclass(frozen=True)
class QuantizedRows:
    """8-bit values [room, inputs] and scales [room] of some rows. What follows after the rows is not set."""

    form: Format
    values: Tensor
    scales: Tensor

    @classmethod
    def room(cls, form: Format, rows: Tensor) -> QuantizedRows:
        """Room for these rows, or for as many as a product needs."""
        count, inputs = rows.shape
        if form is INT8 and rows.is_cuda:
            count = max(_FEWEST_ROWS, -(-count // form.multiple) * form.multiple)
        values = torch.empty(count, inputs, dtype=form.dtype, device=rows.device)
        return cls(form, values, torch.empty(count, dtype=torch.float32, device=rows.device))


QUANTIZED = "quantized_rows"
"""Attribute of states that were quantised by the kernel that computed them (producers.py)."""


def product(form: Format, states: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """states [..., inputs] times a weight of 8-bit values [outputs, inputs] and scales [outputs], in the
    dtype of the states."""
    rows = states.reshape(-1, states.shape[-1])
    left = _quantized(form, states, rows)
    multiply = _fp8_product if form is FP8 else _int8_product
    out = multiply(rows, left, values, scales, bias)
    return out.view(*states.shape[:-1], len(values))


def add_product(
    form: Format,
    stream: Tensor,
    states: Tensor,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    in_place: bool,
) -> Tensor:
    """The same, added to `stream` [..., outputs]; `in_place`: in its memory."""
    rows = states.reshape(-1, states.shape[-1])
    kernels = _adding_product(states.device.type) if form is FP8 else None
    if kernels is not None and kernels.takes(stream, rows, values):
        left = _quantized(form, states, rows)
        total: Tensor = kernels.add_product(
            stream.view(len(rows), -1), left.values, left.scales, values, scales, bias, in_place=in_place
        )
        return total.view(stream.shape)
    added = product(form, states, values, scales, bias)
    return stream.add_(added) if in_place else stream + added


def _quantized(form: Format, states: Tensor, rows: Tensor) -> QuantizedRows:
    """The rows of `states`, as the kernel that computed them left them, or quantised now."""
    found: QuantizedRows | None = getattr(states, QUANTIZED, None)
    if found is None or found.form is not form:
        found = QuantizedRows.room(form, rows)
        quantize_rows(form, rows, found.values[: len(rows)], found.scales[: len(rows)])
    return found


def _fp8_product(
    rows: Tensor, left: QuantizedRows, values: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    fits = bias is not None and bias.dtype == torch.bfloat16
    out = torch._scaled_mm(
        left.values,
        values.t(),
        scale_a=left.scales[:, None],
        scale_b=scales[None, :],
        bias=bias if fits else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if bias is not None and not fits:
        out = out + bias
    return out.to(rows.dtype)


def _int8_product(
    rows: Tensor, left: QuantizedRows, values: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    sums = torch._int_mm(left.values, values.t())[: len(rows)]
    left_scales = left.scales[: len(rows)]
    kernels = kernels_for(rows.device.type)
    if kernels is not None:
        scaled: Tensor = kernels.scale_sums(sums, left_scales, scales, bias, rows.dtype)
        return scaled
    out = sums.float().mul_(left_scales[:, None]).mul_(scales)
    if bias is not None:
        out += bias
    return out.to(rows.dtype)
