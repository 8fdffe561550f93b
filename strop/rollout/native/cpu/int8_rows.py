"""Products with packed int8 weights (int8_rows.c), where they can be compiled: rollout.quantization=int8 on
CPUs with AVX-512 VNNI or the dot products of NEON."""

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

_FOUR = 4
"""Inputs are multiplied in fours: their number must be a multiple."""
_MOST_INPUTS = 2**16
"""With more, a sum could exceed 32 bits."""
_LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Of the check of a compiled product, whose outputs are below 4."""

_log = logging.getLogger(__name__)


@cache
def _functions(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in _LARGEST_ERROR:
        return None
    library = load_library(Path(__file__).with_suffix(".c"), dtype, int8=True)
    if library is None:
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    threads = ctypes.c_int
    library.strop_scratch_size.argtypes = [size, size, size, threads]
    library.strop_scratch_size.restype = size
    library.strop_pack.argtypes = [*[address] * 4, *[size] * 3, threads]
    library.strop_pack.restype = None
    library.strop_linear.argtypes = [*[address] * 7, size, address, *[size] * 3, threads]
    library.strop_linear.restype = None
    if not _computes_right(library, dtype):
        return None
    return library


def _computes_right(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    def quantized(rows: Tensor) -> Tensor:
        scales = rows.abs().amax(1, keepdim=True).float() / 127
        return (rows / scales + 0.5).floor().double() * scales

    weight = (random(72, 304) / 304**0.5).to(dtype)
    bias = random(72)
    packed = PackedInt8(library, dtype, *weight.shape)
    packed.fill(weight, 0)
    a, b = random(5, 304) / 304**0.5, random(72, 5) / 5**0.5
    adapter = packed.adapter(a, b, 0.5)
    error = 0.0
    for rows in (3, 21):
        x = random(rows, 304)
        expected = quantized(x) @ quantized(weight).T + bias.double()
        expected += x.double() @ a.double().T @ b.double().T * 0.5
        found = packed(x, bias, adapter)
        error = max(error, ((found - expected).abs() / expected.abs().clamp(min=1)).max().item())
    if not error < _LARGEST_ERROR[dtype]:
        _log.warning("int8_rows.c is not used: its products differ by %.1e from those of torch", error)
        return False
    return True


class PackedInt8:
    """An int8 copy of a weight [outs, ins] in the layout of int8_rows.c, with one scale per output."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, outs: int, ins: int) -> None:
        """Not filled yet. `dtype`: of the weight and of the states."""
        width = library.strop_width()
        self._width = width
        self._library = library
        self._dtype = dtype
        self._ins = ins
        self.values = torch.empty(-(-outs // width) * width * ins, dtype=torch.int8)
        self.scales = torch.empty(outs, dtype=torch.float32)

    def fill(self, weight: Tensor, first: int) -> None:
        """Quantise `weight` [some outs, ins]: the outputs from `first` on."""
        weight = weight.detach().to(self._dtype).contiguous()
        threads = torch.get_num_threads()
        scratch = torch.empty(threads * self._ins, dtype=torch.int8)
        self._library.strop_pack(
            weight.data_ptr(),
            self.values.data_ptr(),
            self.scales.data_ptr(),
            scratch.data_ptr(),
            first,
            len(weight),
            self._ins,
            threads,
        )

    def adapter(self, a: Tensor, b: Tensor, scale: float) -> PackedAdapter:
        """Weights of a LoRA adapter, A [rank, ins] and B [outs, rank], to be added to a product."""

        def pack(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            more = -len(a) % self._library.strop_chunk()
            high = F.pad(b.float() * scale, (0, more, 0, -len(b) % self._width))
            low = F.pad(a.float().t(), (0, more))
            return low.contiguous(), high.view(-1, self._width, len(a) + more).mT.contiguous()

        return PackedAdapter(a, b, scale, pack)

    def __call__(self, states: Tensor, bias: Tensor | None, adapter: PackedAdapter | None = None) -> Tensor:
        """states [..., ins] times the weight, plus the bias, plus scale (states A^T) B^T, in the dtype of the
        states. The adapter is not rounded to 8 bits."""
        x = states.to(self._dtype).contiguous()
        rows = x.numel() // self._ins
        out = x.new_empty(*x.shape[:-1], len(self.scales))
        rank = 0
        addresses: list[int | None] = [None, None]
        if adapter is not None:
            low, high = adapter.packed()
            rank = low.shape[1]
            addresses = [low.data_ptr(), high.data_ptr()]
        threads = torch.get_num_threads()
        scratch_size = self._library.strop_scratch_size(rows, self._ins, rank, threads)
        scratch = torch.empty(scratch_size, dtype=torch.int32)
        if bias is not None:
            bias = bias.detach().to(self._dtype)
        self._library.strop_linear(
            x.data_ptr(),
            scratch.data_ptr(),
            self.values.data_ptr(),
            self.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *addresses,
            rank,
            out.data_ptr(),
            rows,
            self._ins,
            len(self.scales),
            threads,
        )
        return out.to(states.dtype)


def packed_int8(dtype: torch.dtype, outs: int, ins: int) -> PackedInt8 | None:
    """Room for an int8 copy of a weight; None where the functions cannot be compiled."""
    library = _functions(dtype) if ins % _FOUR == 0 and ins <= _MOST_INPUTS else None
    return None if library is None else PackedInt8(library, dtype, outs, ins)
