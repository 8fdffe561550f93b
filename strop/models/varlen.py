"""Which kernel attends over packed sequences on a GPU.

Strop's own (flash.py), which sampling agrees with to the last bit, for heads that it was seen to be right for; for others
torch's variable-length flash attention.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from strop.extras import MissingExtra, require
from strop.models.parts import same

Kernel = Callable[..., Tensor]
"""Causal attention inside packed sequences: flash.packed_attention, or what is called like it."""


def varlen_kernel(q: Tensor, k: Tensor, v: Tensor) -> Kernel | None:
    """The kernel for such queries, keys and values, where there is one."""
    if not _sixteen_bits(q):
        return None
    flash = flash_kernels(q, k, v)
    return plain_kernel() if flash is None else flash.packed_attention


def flash_kernels(q: Tensor, k: Tensor, v: Tensor) -> ModuleType | None:
    """models/flash.py, if it can be used for such queries, keys and values."""
    if not _sixteen_bits(q) or k.shape[-1] != v.shape[-1]:
        return None
    return _flash_kernels(q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[-1])


def _sixteen_bits(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def _flash_kernels(device: torch.device, dtype: torch.dtype, group: int, size: int) -> ModuleType | None:
    plain = plain_kernel()
    try:
        flash = require("strop.models.flash", extra="gpu", why="Attention that sampling agrees with")
    except MissingExtra:
        return None
    if plain is None or size > flash.LARGEST:
        return None
    draw = torch.Generator().manual_seed(0)
    q, k, v, above = (torch.randn(201, heads * 2, size, generator=draw).to(device, dtype) for heads in (group, 1, 1, group))
    bounds = torch.tensor([0, 70, 71, 201], dtype=torch.int32, device=device)

    def attended(function: Kernel) -> list[Tensor]:
        found = []
        for window in (None, 40):
            with torch.enable_grad():
                wanted = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
                out = function(*wanted, bounds, 130, window=window)
                found += [out, *torch.autograd.grad(out, wanted, above)]
        return found

    if same(lambda: attended(plain), lambda: attended(flash.packed_attention)):
        return flash
    warnings.warn(
        f"Strop's attention is off for {group} heads of {size} numbers to a key in {dtype}: it does not give the numbers of "
        "torch's here. Log-probs of sampling and training will differ by roundings.",
        stacklevel=3,
    )
    return None


@functools.cache
def plain_kernel() -> Kernel | None:
    """torch's, where this version of torch has one that knows windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        if shared and "enable_gqa" not in known:
            k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
        more: dict[str, Any] = {"enable_gqa": True} if shared and "enable_gqa" in known else {}
        left = -1 if window is None else window - 1
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **more)
        assert isinstance(out, Tensor)
        return out

    return attend
