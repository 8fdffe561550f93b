"""One pass over the logits of a row, forward and backward, compiled for a CPU (logprob_kernels_cpu.c): see
logprobs.py for the formulas. torch reads and writes the logits of some rows once for every operation."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from strop.cpu.compiler import is_arm_linux, load_library


@cache
def _functions(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = None if is_arm_linux() else load_library(Path(__file__).with_suffix(".c"), dtype)
    if library is None:
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    library.strop_row_statistics.argtypes = [*[address] * 5, size, size, size, ctypes.c_float, ctypes.c_int]
    library.strop_row_statistics.restype = None
    library.strop_row_slopes.argtypes = [*[address] * 6, size, size, ctypes.c_float, ctypes.c_int]
    library.strop_row_slopes.restype = None
    return library


def is_available(dtype: torch.dtype) -> bool:
    """Whether they can be compiled here for logits of this dtype."""
    return dtype in (torch.float32, torch.bfloat16) and _functions(dtype) is not None


def statistics(
    logits: Tensor, labels: Tensor, *, temperature: float, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs of the labels [n], (largest z, log Σ exp(z - largest)) [n, 2], and entropies [n] where
    wanted."""
    library = _functions(logits.dtype)
    assert library is not None and logits.stride(1) == 1
    rows, vocabulary = logits.shape
    labels = labels.contiguous()
    log_probs = torch.empty(rows, dtype=torch.float32)
    normaliser = torch.empty(rows, 2, dtype=torch.float32)
    entropies = torch.empty(rows, dtype=torch.float32) if want_entropy else None
    library.strop_row_statistics(
        logits.data_ptr(),
        labels.data_ptr(),
        log_probs.data_ptr(),
        normaliser.data_ptr(),
        _address(entropies),
        rows,
        vocabulary,
        logits.stride(0),
        temperature,
        torch.get_num_threads(),
    )
    return log_probs, normaliser, entropies


def slopes(
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropies: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropies: Tensor | None,
    *,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Derivatives with respect to the logits [n, V] in `dtype`, which is that of the logits, given those with
    respect to log-probs and entropies. They replace the logits."""
    library = _functions(logits.dtype)
    assert library is not None and logits.is_contiguous() and dtype == logits.dtype
    rows, vocabulary = logits.shape
    labels = labels.contiguous()
    normaliser = normaliser.contiguous()
    of_rows = [
        None if numbers is None else numbers.float().contiguous()
        for numbers in (entropies, grad_log_probs, grad_entropies)
    ]
    library.strop_row_slopes(
        logits.data_ptr(),
        labels.data_ptr(),
        normaliser.data_ptr(),
        *map(_address, of_rows),
        rows,
        vocabulary,
        temperature,
        torch.get_num_threads(),
    )
    return logits


def _address(numbers: Tensor | None) -> int | None:
    if numbers is None:
        return None
    return numbers.data_ptr()
