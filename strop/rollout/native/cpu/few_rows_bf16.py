"""Products of few rows with packed bf16 weights (few_rows_bf16.c), on CPUs with AMX."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.cpu.compiler import load_library
from strop.rollout.native.cpu.packed_adapter import PackedAdapter

MOST_ROWS = 256
"""With more rows the product of torch is as fast."""
_DEPTH = 32
_BLOCK = 32
_LARGEST_ERROR = 2**-6
"""Of the check of a compiled product, whose outputs are below 4 and have a step of 2^-6 there."""

_log = logging.getLogger(__name__)


@cache
def _functions() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_suffix(".c"), amx=True)
    if library is None or not library.strop_allow_tiles():
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    library.strop_packed_size.argtypes = [size, size]
    library.strop_packed_size.restype = size
    library.strop_sums_size.argtypes = [size]
    library.strop_sums_size.restype = size
    library.strop_blocks.argtypes = [size]
    library.strop_blocks.restype = size
    library.strop_pack.argtypes = [address, address, size, size, ctypes.c_int]
    library.strop_pack.restype = None
    library.strop_linear.argtypes = [*[address] * 7, ctypes.c_float, size, address, size, size, size]
    library.strop_linear.argtypes += [ctypes.c_int]
    library.strop_linear.restype = None
    if not _computes_right(library):
        return None
    return library


def _computes_right(library: ctypes.CDLL) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    weight, a, b, bias = random(70, 300), random(5, 300), random(70, 5), random(70)
    packed = PackedBf16Weight(library, weight)
    error = 0.0
    for rows in (3, 50):
        x = torch.randn(rows, 300, generator=generator).bfloat16()
        expected = F.linear(x.float(), weight.float(), bias.float())
        expected += F.linear(F.linear(x.float(), a.float()), b.float()) * 0.5
        found = packed(x, bias, packed.adapter(a, b, 0.5))
        error = max(error, ((found - expected) / expected.abs().clamp(min=1)).abs().max().item())
    if not error < _LARGEST_ERROR:
        _log.warning("few_rows_bf16.c is not used: its products differ by %.1e from those of torch", error)
        return False
    return True


class PackedBf16Weight:
    """A copy of a bf16 weight [out, in] in the layout of few_rows_bf16.c."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        self._library = library
        self.outs, self.ins = weight.shape
        self._packed = _packed(library, weight)

    @property
    def num_bytes(self) -> int:
        return self._packed.numel() * self._packed.itemsize

    def takes(self, states: Tensor, rank: int = 0) -> bool:
        """Whether it can multiply these states, and add an adapter of this rank."""
        return states.dtype == torch.bfloat16 and 1 <= states.numel() // self.ins <= MOST_ROWS

    def adapter(self, a: Tensor, b: Tensor, scale: float) -> PackedAdapter:
        return PackedAdapter(a, b, scale, self._pack_adapter)

    def _pack_adapter(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return _packed(self._library, a), _packed(self._library, b)

    def __call__(self, states: Tensor, bias: Tensor | None, adapter: PackedAdapter | None = None) -> Tensor:
        """states W^T + bias + scale (states A^T) B^T."""
        states = states.contiguous()
        rows = states.numel() // self.ins
        out = states.new_empty(*states.shape[:-1], self.outs)
        rank = 0
        scale = 0.0
        addresses: list[int | None] = [None, None]
        if adapter is not None:
            rank = adapter.rank
            scale = adapter.scale
            addresses = [packed.data_ptr() for packed in adapter.packed()]
        columns = _DEPTH * (-(-self.ins // _DEPTH) + -(-rank // _DEPTH))
        scratch = states.new_empty(self._library.strop_blocks(rows) * _BLOCK * columns)
        threads = torch.get_num_threads()
        sums = torch.empty(threads * self._library.strop_sums_size(rows), dtype=torch.float32)
        self._library.strop_linear(
            states.data_ptr(),
            scratch.data_ptr(),
            sums.data_ptr(),
            self._packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *addresses,
            scale,
            rank,
            out.data_ptr(),
            rows,
            self.ins,
            self.outs,
            threads,
        )
        return out


def _packed(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    source = weight.detach().contiguous()
    packed = source.new_empty(library.strop_packed_size(*source.shape))
    library.strop_pack(source.data_ptr(), packed.data_ptr(), *source.shape, torch.get_num_threads())
    return packed


def packed_bf16_weight(weight: Tensor) -> PackedBf16Weight | None:
    """A packed copy of a bf16 weight on the CPU; None where the functions cannot be compiled."""
    library = _functions() if weight.dtype == torch.bfloat16 else None
    if library is None:
        return None
    return PackedBf16Weight(library, weight)
