"""Products of few rows with packed float32 weights (few_rows.c), where they can be compiled."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.cpu.compiler import is_arm_linux, load_library

_LEAST_ROWS = 2 if is_arm_linux() else 1
"""On Arm the matrix-vector product of torch is faster."""
MOST_ROWS = 512
MOST_RANK = 256
_GROUP = 8
_SAMPLE = 1024
_LARGEST_ERROR = 1e-5
"""Of the check of a compiled product, whose outputs are about 1."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """Weights of a LoRA adapter, A [rank, in] and B [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float


@cache
def _functions() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_suffix(".c"))
    if library is None:
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    number = ctypes.c_int
    library.strop_pack.argtypes = [address, address, size, size, number, number]
    library.strop_pack.restype = None
    library.strop_linear.argtypes = [*[address] * 3, number, *[address] * 3, ctypes.c_float, size, address]
    library.strop_linear.argtypes += [size, size, size, number]
    library.strop_linear.restype = None
    if not _computes_right(library):
        return None
    return library


def _computes_right(library: ctypes.CDLL) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    weight = random(70, 300) / 300**0.5
    adapter = Adapter(random(5, 300) / 300**0.5, random(70, 5) / 5**0.5, 0.5)
    x = random(21, 300)
    bias = random(70)
    expected = F.linear(x, weight, bias) + F.linear(F.linear(x, adapter.a), adapter.b) * adapter.scale
    error = (PackedWeight(library, weight)(x, bias, adapter) - expected).abs().max().item()
    short = weight.bfloat16().float()
    error = max(error, (PackedWeight(library, short)(x, None) - F.linear(x, short)).abs().max().item())
    if not error < _LARGEST_ERROR:
        _log.warning("few_rows.c is not used: its products differ by %.1e from those of torch", error)
        return False
    return True


class PackedWeight:
    """A copy of a weight [out, in] in the layout of few_rows.c, in 16 bits if it is exact in bf16."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        self._library = library
        self.outs, self.ins = weight.shape
        width = library.strop_width()
        panels = -(-self.outs // width)
        source = weight.detach().contiguous()
        self._short = _is_bf16(source)
        self._packed = torch.empty(panels * width * self.ins, dtype=_stored(self._short))
        threads = torch.get_num_threads()
        library.strop_pack(
            source.data_ptr(), self._packed.data_ptr(), self.outs, self.ins, self._short, threads
        )

    @property
    def num_bytes(self) -> int:
        return self._packed.numel() * self._packed.itemsize

    def takes(self, states: Tensor, rank: int = 0) -> bool:
        """Whether it can multiply these states, and add an adapter of this rank."""
        rows = states.numel() // self.ins
        return states.dtype == torch.float32 and _LEAST_ROWS <= rows <= MOST_ROWS and rank <= MOST_RANK

    def adapter(self, a: Tensor, b: Tensor, scale: float) -> Adapter:
        return Adapter(a, b, scale)

    def __call__(self, states: Tensor, bias: Tensor | None, adapter: Adapter | None = None) -> Tensor:
        """states W^T + bias + scale (states A^T) B^T."""
        states = states.contiguous()
        rows = states.numel() // self.ins
        out = states.new_empty(*states.shape[:-1], self.outs)
        rank = 0
        scale = 0.0
        addresses: list[int | None] = [None, None]
        if adapter is not None:
            rank = len(adapter.a)
            scale = adapter.scale
            addresses = [adapter.a.data_ptr(), adapter.b.data_ptr()]
        scratch = states.new_empty((rows + _GROUP) * (self.ins + rank))
        self._library.strop_linear(
            states.data_ptr(),
            scratch.data_ptr(),
            self._packed.data_ptr(),
            self._short,
            None if bias is None else bias.data_ptr(),
            *addresses,
            scale,
            rank,
            out.data_ptr(),
            rows,
            self.ins,
            self.outs,
            torch.get_num_threads(),
        )
        return out


def _stored(short: bool) -> torch.dtype:
    return torch.int16 if short else torch.float32


def _is_bf16(weight: Tensor) -> bool:
    """Whether all float32 numbers of a contiguous weight are numbers in bf16."""
    bits = weight.view(torch.int32).view(-1)
    parts = (bits[:_SAMPLE], bits[_SAMPLE:])  # the first one shows trained weights at once
    return not any(bool((part & 0xFFFF).any()) for part in parts)


def packed_weight(weight: Tensor) -> PackedWeight | None:
    """A packed copy of a float32 weight on the CPU; None where the functions cannot be compiled."""
    library = _functions() if weight.dtype == torch.float32 else None
    if library is None:
        return None
    return PackedWeight(library, weight)
