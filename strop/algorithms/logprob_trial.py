"""Which compiled functions pass over rows of logits: Triton's on a GPU (logprob_kernels.py), C's on a CPU
(logprob_kernels_cpu.py). They are tried once, against plain torch."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from strop.algorithms import logprob_kernels_cpu
from strop.extras import MissingExtra, kernel_errors, require


class RowFunctions(Protocol):
    """Numbers per row of logits [n, V], and derivatives with respect to them."""

    def statistics(
        self, logits: Tensor, labels: Tensor, *, temperature: float, want_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def slopes(
        self,
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
        """In `dtype`. The logits may be lost."""


@cache
def compiled_functions(device: torch.device, dtype: torch.dtype, plain: RowFunctions) -> RowFunctions | None:
    """Those that run on the device and agree with `plain`, which is what they are compared with. `dtype`: of
    the logits."""
    try:
        kernels = _compiled(device, dtype)
        if kernels is None or functions_agree(kernels, plain, device, dtype):
            return kernels
        reason = "they do not give the numbers of plain torch on this device"
    except MissingExtra as error:
        reason = str(error)
    except kernel_errors() as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(
        f"The kernels of the output head are off, which makes updates slower: {reason}.", stacklevel=3
    )
    return None


def _compiled(device: torch.device, dtype: torch.dtype) -> RowFunctions | None:
    if device.type == "cpu":
        if not logprob_kernels_cpu.is_available(dtype):
            return None
        return cast(RowFunctions, logprob_kernels_cpu)
    found = require("strop.algorithms.logprob_kernels", extra="gpu", why="The fast output head on a GPU")
    return cast(RowFunctions, found)


@torch.no_grad()
def functions_agree(
    kernels: RowFunctions, plain: RowFunctions, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether both give the same numbers, on rows that contain every special case."""
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, 9001, generator=draw)).to(device, dtype)
    logits[1, 7] = float("-inf")
    labels = torch.tensor([0, 9000, -100, 4095, 4096, 3], device=device)
    above = torch.randn(2, 6, generator=draw).to(device)
    expected = plain.statistics(logits, labels, temperature=0.7, want_entropy=True)
    found = kernels.statistics(logits, labels, temperature=0.7, want_entropy=True)
    of_plain, of_kernels = (
        functions.slopes(logits.clone(), labels, *expected[1:], *above, temperature=0.7, dtype=dtype).float()
        for functions in (plain, kernels)
    )
    # One rounding to bf16 may go the other way.
    rounding = max(2e-5, torch.finfo(dtype).eps)
    return torch.allclose(of_plain, of_kernels, rtol=rounding, atol=2e-5) and all(
        torch.allclose(a, b, rtol=2e-5, atol=2e-5)
        for a, b in zip(expected, found, strict=True)
        if a is not None and b is not None
    )
