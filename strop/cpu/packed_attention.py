"""Causal attention inside packed sequences in bf16, with its gradients, on CPUs with AMX
(packed_attention.c). With torch's attention of padded rows, the backward pass takes ten times as long."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.cpu.compiler import load_library

_SIZE_STEP = 64
"""Numbers of a head come in so many."""
_LARGEST_ERROR = 2e-2
"""Of the check of compiled functions, relative to the norm: several numbers are rounded to bf16."""

_log = logging.getLogger(__name__)


@cache
def _functions() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_suffix(".c"), amx=True)
    if library is None or not library.strop_allow_tiles():
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    library.strop_attention_scratch.argtypes = [size, size]
    library.strop_attention_scratch.restype = size
    library.strop_attention.argtypes = [*[address] * 8, *[size] * 5, ctypes.c_float, ctypes.c_int]
    library.strop_attention.restype = None
    library.strop_attention_backward.argtypes = [*[address] * 12, *[size] * 5, ctypes.c_float, ctypes.c_int]
    library.strop_attention_backward.restype = None
    if not _computes_right(library):
        return None
    return library


@torch.no_grad()
def _computes_right(library: ctypes.CDLL) -> bool:
    """Without autograd: the first call may be in a layer whose saved tensors checkpointing counts."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, above = (
        torch.randn(71, heads, _SIZE_STEP, generator=generator).bfloat16() for heads in (4, 2, 2, 4)
    )
    bounds = torch.tensor([0, 70, 71], dtype=torch.int32)
    sequences = _Sequences(library, bounds, 70, _SIZE_STEP**-0.5)
    out, lse = sequences.forward(q, k, v)
    found = [out, *sequences.backward(q, k, v, out, lse, above)]
    expected = _by_formula(*(states[:70].float().transpose(0, 1) for states in (q, k, v, above)))
    for ours, theirs in zip(found, expected, strict=True):
        error = ((ours[:70].float().transpose(0, 1) - theirs).norm() / theirs.norm()).item()
        if not error < _LARGEST_ERROR:
            _log.warning("packed_attention.c is not used: it differs by %.1e from torch", error)
            return False
    return True


def _by_formula(q: Tensor, k: Tensor, v: Tensor, above: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention in one sequence, and the gradients of queries, keys and values; [heads, N, D] each."""
    heads, tokens, size = q.shape
    group = heads // len(k)
    k, v = (states.repeat_interleave(group, dim=0) for states in (k, v))
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    p = (q @ k.mT * size**-0.5).masked_fill(later, float("-inf")).softmax(-1)
    slopes = above @ v.mT
    slopes = p * (slopes - (p * slopes).sum(-1, keepdim=True)) * size**-0.5
    of_keys = (slopes.mT @ q).unflatten(0, (-1, group)).sum(1)
    of_values = (p.mT @ above).unflatten(0, (-1, group)).sum(1)
    return p @ v, slopes @ k, of_keys, of_values


class _Sequences:
    """Where packed sequences begin and end, and the memory to attend them."""

    def __init__(self, library: ctypes.CDLL, bounds: Tensor, longest: int, scale: float) -> None:
        self._library = library
        self._bounds = bounds.to(torch.int32).contiguous()
        self._tokens = int(bounds[-1])
        self._longest = longest
        self._scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads [N, heads, D] see, and log Σ exp(score) [heads, N]."""
        out = self._empty(q)
        lse = torch.empty(q.shape[1], len(q), dtype=torch.float32)
        given = [states.data_ptr() for states in (q, k, v)]
        scratch = self._scratch(q)
        self._library.strop_attention(
            *given,
            _distances(q, k, v),
            self._bounds.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            scratch.data_ptr(),
            *self._work(q, k, scratch),
        )
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        found = [self._empty(states) for states in (q, k, v)]
        scratch = self._scratch(q)
        self._library.strop_attention_backward(
            *(states.data_ptr() for states in (q, k, v, out, grad)),
            _distances(q, k, v, out, grad),
            self._bounds.data_ptr(),
            lse.data_ptr(),
            *(states.data_ptr() for states in found),
            scratch.data_ptr(),
            *self._work(q, k, scratch),
        )
        return found[0], found[1], found[2]

    def _empty(self, states: Tensor) -> Tensor:
        """Memory for numbers like these; zeros behind the last sequence."""
        found = torch.empty(states.shape, dtype=states.dtype)
        found[self._tokens :] = 0
        return found

    def _scratch(self, q: Tensor) -> Tensor:
        """[threads, bytes]"""
        size = self._library.strop_attention_scratch(self._longest, q.shape[-1])
        return torch.empty(torch.get_num_threads(), -(-size // 64) * 64, dtype=torch.uint8)

    def _work(self, q: Tensor, k: Tensor, scratch: Tensor) -> tuple[float, ...]:
        threads, size = scratch.shape
        return (size, len(self._bounds) - 1, q.shape[1], k.shape[1], q.shape[2], self._scale, threads)


def _distances(*states: Tensor) -> ctypes.Array[ctypes.c_ssize_t]:
    """Between the tokens and between the heads of each."""
    found = [distance for one in states for distance in one.stride()[:2]]
    return (ctypes.c_ssize_t * len(found))(*found)


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: _Sequences) -> Tensor:
        out, lse = sequences.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sequences = sequences
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *ctx.sequences.backward(*ctx.saved_tensors, _with_whole_heads(grad)), None


def _with_whole_heads(states: Tensor) -> Tensor:
    """The numbers of a head one after the other."""
    if states.stride(-1) == 1:
        return states
    return states.contiguous()


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether it can attend such heads [N, heads, D]."""
    fits = q.device.type == "cpu" and q.dtype == k.dtype == v.dtype == torch.bfloat16
    fits = fits and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % _SIZE_STEP == 0
    return fits and _functions() is not None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """q [N, heads, D], k and v [N, key heads, D] -> [N, heads, D]. bounds [sequences + 1] of the packed
    sequences, of which the longest has `longest` tokens."""
    library = _functions()
    assert library is not None and window is None
    if scale is None:
        scale = q.shape[-1] ** -0.5
    sequences = _Sequences(library, bounds, longest, scale)
    found: Tensor = _CompiledAttention.apply(*map(_with_whole_heads, (q, k, v)), sequences)
    return found
