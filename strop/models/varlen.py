"""Variable-length attention kernels for packed sequences, on a GPU and on CPUs with AMX.

Strop's flash attention (models/flash.py) is used for head shapes that passed a self-check when a model was
built: the rollout engine repeats its numbers to the last bit. All other 16-bit heads use torch's
variable-length flash attention. A forward pass only looks the kernel up. CPUs have cpu/packed_attention.py.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.cpu import packed_attention
from strop.extras import MissingExtra, require
from strop.models.self_check import same

DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)


class Kernel(Protocol):
    """Causal attention inside packed sequences: q [N, heads, D], k and v [N, key heads, D]."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        longest: int,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class HeadShape:
    """What a kernel is compiled and checked for."""

    device: torch.device
    dtype: torch.dtype
    group: int
    """Query heads per key head."""
    size: int
    """Numbers per head."""


_users: Counter[HeadShape] = Counter()
"""Models that use flash attention, by head shape."""


def varlen_kernel(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Kernel | None:
    """The kernel for such queries, keys and values; None where there is none."""
    if window is None and packed_attention.takes(q, k, v):
        return packed_attention.packed_attention
    if not _supported(q.device, q.dtype):
        return None
    flash = flash_kernels(q, k, v)
    if flash is None:
        return plain_kernel()
    kernel: Kernel = flash.packed_attention
    return kernel


def flash_kernels(q: Tensor, k: Tensor, v: Tensor) -> ModuleType | None:
    """models/flash.py, where a model uses it for heads of this shape."""
    if not _supported(q.device, q.dtype) or k.shape[-1] != v.shape[-1]:
        return None
    shape = HeadShape(q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[-1])
    if not _users[shape]:
        return None
    return checked_flash(shape)


def _supported(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type in DEVICES and dtype in DTYPES


def head_shapes(
    model: nn.Module, device: torch.device, dtype: torch.dtype, sequence_parallel: int = 1
) -> set[HeadShape]:
    """The head shapes that attention layers of `model` compute with in this precision on this device."""
    if not _supported(device, dtype):
        return set()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    pairs: set[tuple[int, int]] = set()
    for part in model.modules():
        group = getattr(part, "num_key_value_groups", None)
        size = getattr(part, "head_dim", None)
        if isinstance(group, int) and isinstance(size, int):
            pairs.add((group, size))
    if not pairs:
        pairs = _pairs_of(getattr(model, "config", None))
    if sequence_parallel > 1:
        # Ulysses repeats key heads that it cannot divide over the ranks: one per query head.
        pairs |= {(1, size) for _, size in pairs}
    return {HeadShape(device, dtype, group, size) for group, size in pairs}


def _pairs_of(config: object) -> set[tuple[int, int]]:
    """(query heads per key head, head size) as a model's configuration says."""
    text: Any = getattr(config, "get_text_config", lambda: None)()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return set()
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return {(heads // key_heads, size)}


class UseFlash:
    """Lets one model use flash attention for heads of one shape. A change of models/patches.py."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape

    def do(self) -> None:
        _users[self.shape] += 1

    def undo(self) -> None:
        _users[self.shape] -= 1

    def can_undo(self) -> bool:
        return True


@functools.cache
def checked_flash(shape: HeadShape) -> ModuleType | None:
    """models/flash.py, if it gives torch's numbers and gradients for heads of this shape. Runs both once."""
    plain = plain_kernel()
    flash = _load_flash()
    if plain is None or flash is None or shape.size > flash.LARGEST:
        return None
    draw = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(201, heads * 2, shape.size, generator=draw).to(shape.device, shape.dtype)

    q = drawn(shape.group)
    k = drawn(1)
    v = drawn(1)
    above = drawn(shape.group)
    bounds = torch.tensor([0, 70, 71, 201], dtype=torch.int32, device=shape.device)

    def attended(function: Kernel) -> list[Tensor]:
        found: list[Tensor] = []
        for window in (None, 40):
            with torch.enable_grad():
                inputs = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())
                out = function(*inputs, bounds, 130, window=window)
                found += [out, *torch.autograd.grad(out, inputs, above)]
        return found

    if same(lambda: attended(plain), lambda: attended(flash.packed_attention)):
        return flash
    warnings.warn(
        f"Strop's flash attention is off for {shape.group} query heads of size {shape.size} per key head in "
        f"{shape.dtype}: it does not give the numbers of torch's kernel here. Log-probs of sampling and "
        "training will differ by roundings.",
        stacklevel=3,
    )
    return None


def _load_flash() -> ModuleType | None:
    try:
        return require("strop.models.flash", extra="gpu", why="Attention that sampling agrees with")
    except MissingExtra:
        return None


@functools.cache
def plain_kernel() -> Kernel | None:
    """torch's kernel, where this version of torch has one that supports windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        return None
    has_gqa = "enable_gqa" in known

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        longest: int,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        options: dict[str, Any] = {}
        if grouped and has_gqa:
            options["enable_gqa"] = True
        elif grouped:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        left = -1 if window is None else window - 1
        out = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            bounds,
            bounds,
            longest,
            longest,
            scale=scale,
            window_size=(left, 0),
            **options,
        )
        assert isinstance(out, Tensor)
        return out

    return attend


@functools.cache
def both_ways_kernel() -> Kernel | None:
    """torch's kernel without the causal rule, for vision towers: every token sees its whole sequence."""
    if plain_kernel() is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        longest: int,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        assert window is None, "a tower has windows as sequences of their own"
        tensors = (q.contiguous(), k.contiguous(), v.contiguous())
        out = varlen_attn(*tensors, bounds, bounds, longest, longest, scale=scale)
        assert isinstance(out, Tensor)
        return out

    return attend
