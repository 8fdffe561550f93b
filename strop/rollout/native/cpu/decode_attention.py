"""Attention of decode steps on a CPU (decode_attention.c), where it can be compiled.

torch's attention on a CPU reads keys and values of decode steps at half the rate of the memory, and all rows
as far as the longest one.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.cpu.compiler import is_arm_linux, load_library

NAME = "decode_attention"
"""In model.patches."""
_LANES = 16
_PART = 4 * _LANES
_MOST_SIZE = 256
_LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""Of the check of a compiled function, whose outputs are below 2."""

_log = logging.getLogger(__name__)


class MaskAndScale(Protocol):
    """The options of a layer's attention that it knows."""

    @property
    def scale(self) -> float | None: ...

    @property
    def window(self) -> int | None: ...


@cache
def _function(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = None if is_arm_linux() else _library(dtype)
    if library is None:
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    library.strop_decode_attention.argtypes = (
        [address] * 9 + [size] * 6 + [ctypes.c_float, size, ctypes.c_int]
    )
    library.strop_decode_attention.restype = None
    if not _computes_right(library, dtype):
        return None
    return library


def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """With AMX where it is for the dtype and the CPU."""
    source = Path(__file__).with_suffix(".c")
    if dtype == torch.bfloat16:
        library = load_library(source, dtype, amx=True)
        if library is not None and library.strop_allow_tiles():
            return library
    return load_library(source, dtype)


def _computes_right(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = random(2, 2, 3, 64)
    keys = random(3, 2, 50, 64)
    values = random(3, 2, 50, 64)
    newest = (random(2, 2, 64), random(2, 2, 64))
    places = torch.tensor([2, 0])
    positions = torch.tensor([40, 15])
    out = _call(library, query, newest, keys, values, places, positions, 64**-0.5, 20)
    written = torch.equal(keys[places, :, positions], newest[0])
    written &= torch.equal(values[places, :, positions], newest[1])
    error = 0.0
    for row, (place, end) in enumerate([(2, 41), (0, 16)]):
        seen = slice(max(0, end - 20), end)
        expected = F.scaled_dot_product_attention(
            query[row].float(), keys[place, :, seen].float(), values[place, :, seen].float()
        )
        error = max(error, (out[row] - expected).abs().max().item())
    if not written or not error <= _LARGEST_ERROR[dtype]:
        _log.warning("decode_attention.c is not used: it differs by %.1e from torch", error)
        return False
    return True


def is_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this machine can compile it for such numbers and computes it right."""
    return dtype in _LARGEST_ERROR and _function(dtype) is not None


def takes(dtype: torch.dtype, key_size: int, value_size: int) -> bool:
    """Whether it can compute heads of this size and precision."""
    fits = key_size == value_size and key_size % _PART == 0 and key_size <= _MOST_SIZE
    return fits and dtype in _LARGEST_ERROR


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    positions: Tensor,
    options: MaskAndScale,
    newest: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention [rows, 1, heads, size] of one token per row: `query` is [rows, key heads, heads, size].

    Row r sees the positions up to positions[r], or the last `options.window` of them, of row places[r] of the
    cache: `keys` and `values` are [cache rows, key heads, capacity, size]. `newest`: keys and values [rows,
    key heads, size] of these positions, which are written to the cache first."""
    library = _function(query.dtype)
    assert library is not None
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    query = query.contiguous()
    out = _call(library, query, newest, keys, values, places, positions, scale, options.window or 0)
    return out.flatten(1, 2)[:, None]


def _call(
    library: ctypes.CDLL,
    query: Tensor,
    newest: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    rows, key_heads, heads, size = query.shape
    capacity = keys.shape[2]
    assert keys.is_contiguous() and values.is_contiguous()
    new = [None, None] if newest is None else [one.contiguous() for one in newest]
    threads = torch.get_num_threads()
    per_thread = heads * (-(-capacity // _LANES) * _LANES)
    out = torch.empty_like(query)
    scores = torch.empty(threads * per_thread, dtype=torch.float32)
    library.strop_decode_attention(
        query.data_ptr(),
        *(None if one is None else one.data_ptr() for one in new),
        keys.data_ptr(),
        values.data_ptr(),
        places.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        scores.data_ptr(),
        rows,
        key_heads,
        heads,
        size,
        capacity,
        window,
        scale,
        per_thread,
        threads,
    )
    return out
