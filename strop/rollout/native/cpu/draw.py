"""The next token of each row on a CPU (draw.c), where it can be compiled: what sampler.py does for rows
without top-k, top-p, min-p and penalties. torch reads and writes all logits six times for it."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from strop.cpu.compiler import is_arm_linux, load_library

_LARGEST_ERROR = 1e-5
"""Of the check of a compiled function, whose log-probs are about -6."""

SMALLEST_VOCABULARY = 8192
"""With fewer tokens torch is as fast, and nothing need be compiled. A limit that counts rows would make a row
depend on the others."""

_log = logging.getLogger(__name__)


_DTYPES = (torch.float32, torch.bfloat16)


@cache
def _function(dtype: torch.dtype) -> ctypes.CDLL | None:
    library = None if is_arm_linux() else load_library(Path(__file__).with_suffix(".c"), dtype)
    if library is None:
        return None
    address = ctypes.c_void_p
    size = ctypes.c_ssize_t
    library.strop_draw.argtypes = [*[address] * 8, size, size, size, ctypes.c_int]
    library.strop_draw.restype = None
    if not _computes_right(library, dtype):
        return None
    return library


def _computes_right(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1301, generator=generator).to(dtype)
    uniform = torch.tensor([0.3, 0.999, 0.5], dtype=torch.float64)
    temperature = torch.tensor([1.0, 0.7, 1.0])
    greedy = torch.tensor([False, False, True])
    tokens, log_probs, valid = _call(library, logits, uniform, temperature, greedy)
    expected = (logits.float() / temperature[:, None]).double().log_softmax(-1)
    bounds = expected.exp().cumsum(-1)
    chosen = tokens[:2, None]
    # The cumulative probability passes the uniform number at the chosen token.
    inside = (bounds[:2].gather(1, chosen)[:, 0] >= uniform[:2] - _LARGEST_ERROR).all()
    before = (bounds[:2] - expected[:2].exp()).gather(1, chosen)[:, 0]
    inside &= (before <= uniform[:2] + _LARGEST_ERROR).all()
    inside &= tokens[2] == logits[2].argmax()
    error = (log_probs - expected.gather(1, tokens[:, None])[:, 0]).abs().max().item()
    if not (inside and valid.all() and error < _LARGEST_ERROR):
        _log.warning("draw.c is not used: its log-probs differ by %.1e from those of torch", error)
        return False
    return True


def takes(logits: Tensor) -> bool:
    """Whether it can draw from such logits."""
    fits = logits.dtype in _DTYPES and logits.device.type == "cpu" and logits.stride(1) == 1
    return fits and _function(logits.dtype) is not None


def draw(
    logits: Tensor, uniform: Tensor, temperature: Tensor | None, greedy: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probs at the temperature, and whether the logits [rows, vocabulary] are numbers.
    `uniform`: a float64 number in [0, 1) per row; `greedy`: rows that take their likeliest token."""
    library = _function(logits.dtype)
    assert library is not None
    return _call(library, logits, uniform, temperature, greedy)


def _call(
    library: ctypes.CDLL, logits: Tensor, uniform: Tensor, temperature: Tensor | None, greedy: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    assert uniform.dtype == torch.float64
    uniform = uniform.contiguous()
    if temperature is not None:
        temperature = temperature.float().contiguous()
    if greedy is not None:
        greedy = greedy.bool().contiguous()
    threads = torch.get_num_threads()
    tokens = torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows, dtype=torch.float32)
    valid = torch.empty(rows, dtype=torch.bool)
    bounds = torch.empty(threads * -(-vocabulary // library.strop_block()), dtype=torch.float64)
    library.strop_draw(
        logits.data_ptr(),
        uniform.data_ptr(),
        None if temperature is None else temperature.data_ptr(),
        None if greedy is None else greedy.data_ptr(),
        tokens.data_ptr(),
        log_probs.data_ptr(),
        valid.data_ptr(),
        bounds.data_ptr(),
        rows,
        vocabulary,
        logits.stride(0),
        threads,
    )
    return tokens, log_probs, valid
