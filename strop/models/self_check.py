"""Self-check of a kernel: it must give the numbers of plain torch before a model uses it.

Self-checks run when a model is built (models/patches.py), never inside a forward pass: there, autograd and
gradient checkpointing raise exceptions of their own to steer the pass.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.extras import kernel_errors

log = logging.getLogger(__name__)

refused: dict[str, str] = {}
"""Kernels of this process that plain torch stands in for, by their patch, and why."""


def same(
    plain: Callable[[], Sequence[Tensor]],
    kernel: Callable[[], Sequence[Tensor]],
    ulps: int = 8,
    *,
    name: str | None = None,
) -> bool:
    """Whether two ways to compute the same tensors agree up to the last bits of their dtype: so many units in
    the last place of the largest number.

    `name`: of the patch that uses the kernel, where the kernel is expected to fit: if it does not, a warning
    says by how much. Without it, the check is how one finds out whether it fits.
    """
    with warnings.catch_warnings():
        # The first backward pass of a process warns that it finds no CUDA context yet, and makes one.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
        expected = plain()
    try:
        found = kernel()
    except kernel_errors() as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"A kernel does not run here, plain torch does its work: {reason}", stacklevel=2)
        if name is not None:
            refused[name] = f"it does not run here: {reason}"
        return False
    problem = _problem(expected, found, ulps)
    if problem is not None and name is not None:
        refused[name] = problem
        log.warning("Kernel %s is off, plain torch does its work: %s.", name, problem)
    return problem is None


def _problem(expected: Sequence[Tensor], found: Sequence[Tensor], ulps: int) -> str | None:
    """What is wrong with the numbers of a kernel, or None."""
    if [(one.shape, one.dtype) for one in expected] != [(one.shape, one.dtype) for one in found]:
        return "its results have other shapes or dtypes than those of torch"
    worst = 0.0
    problem = None
    for one, other in zip(expected, found, strict=True):
        scale = one.detach().float().abs().max().clamp(min=1e-6)
        difference = (one.detach().float() - other.detach().float()).abs().max()
        units = float(difference / (torch.finfo(one.dtype).eps * scale))
        if not units <= max(ulps, worst):  # NaN is a problem too
            worst = units
            problem = (
                f"its numbers differ by up to {float(difference):.2g} from those of torch, {units:.0f} units "
                f"in the last place of {one.dtype}; up to {ulps} are rounding"
            )
    return problem
