"""Self-check of a kernel: it must give the numbers of plain torch before a model uses it.

Self-checks run when a model is built (models/patches.py), never inside a forward pass: there, autograd and
gradient checkpointing raise exceptions of their own to steer the pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.extras import kernel_errors


def same(
    plain: Callable[[], Sequence[Tensor]], kernel: Callable[[], Sequence[Tensor]], ulps: int = 8
) -> bool:
    """Whether two ways to compute the same tensors agree up to the last bits of their dtype: so many units in
    the last place of the largest number."""
    with warnings.catch_warnings():
        # The first backward pass of a process warns that it finds no CUDA context yet, and makes one.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
        expected = plain()
    try:
        found = kernel()
    except kernel_errors() as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"A kernel does not run here, plain torch does its work: {reason}", stacklevel=2)
        return False
    if len(found) != len(expected):
        return False
    return all(_close(one, other, ulps) for one, other in zip(expected, found, strict=True))


def _close(expected: Tensor, found: Tensor, ulps: int) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    scale = expected.detach().float().abs().max().clamp(min=1e-6)
    difference = (expected.float() - found.float()).abs().max()
    return bool(difference <= ulps * torch.finfo(expected.dtype).eps * scale)
