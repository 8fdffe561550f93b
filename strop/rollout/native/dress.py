"""What a module wears while the engine has it on loan: rollout attention, evaluation mode, and on a GPU faster small parts.

Norms, rotary embeddings and gated activations of most decoders are a handful of formulas, written in a dozen kernels each. The
ones in `kernels` take their place, but only where they were seen to give the numbers of the part they replace; whatever they
do not match stays as it is. The output head gives float32 logits, because bf16 has steps of 1/8 at the usual size of a logit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from strop.models.precision import narrows
from strop.rollout.native.attention import NAME

_ROTARY = "apply_rotary_pos_emb"


@contextmanager
def on_loan(model: Any, changes: Changes | None = None) -> Iterator[None]:
    """The module dressed for a rollout; afterwards every part is as it was before."""
    before = model.config._attn_implementation
    training = [part for part in model.modules() if part.training]
    model.set_attn_implementation(NAME)
    try:
        for part in training:
            part.training = False
        if changes is not None:
            changes.put_on()
        yield
    finally:
        if changes is not None:
            changes.take_off()
        for part in training:
            part.training = True
        model.set_attn_implementation(before)


class Changes:
    """The parts of one model that have a faster equivalent. Found once, by trying; put on and taken off for each loan."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self._functions: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []
        device = next(model.parameters()).device
        if device.type != "cuda":
            return
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if type(head) is nn.Linear and head.weight.dtype in (torch.bfloat16, torch.float16):
            self._forwards.append((head, _wide_head(head)))
        verdicts: dict[object, bool] = {}
        for part in model.modules():
            for find in (_norm, _gated):
                found = find(part)
                if found is not None:
                    replacement, size, kind = found
                    if kind not in verdicts:
                        verdicts[kind] = _agrees(part, replacement, size)
                    if verdicts[kind]:
                        self._forwards.append((part, replacement))
        for name in {type(part).__module__ for part in model.modules()}:
            home = sys.modules[name]
            own = vars(home).get(_ROTARY)
            if own is not None and _rotates_alike(own, device, next(model.parameters()).dtype):
                self._functions.append((home, own, _faster_rotary(own)))

    def put_on(self) -> None:
        for part, forward in self._forwards:
            part.forward = forward
        for home, _, faster in self._functions:
            setattr(home, _ROTARY, faster)

    def take_off(self) -> None:
        for part, _ in self._forwards:
            part.__dict__.pop("forward", None)
        for home, own, _ in self._functions:
            setattr(home, _ROTARY, own)


Found = tuple[Callable[..., Tensor], int, object]
"""A replacement for a part's forward, the size of the input it takes, and what parts of equal kind have in common."""


def _norm(part: nn.Module) -> Found | None:
    weight, eps = getattr(part, "weight", None), getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    if getattr(part, "bias", None) is not None or "forward" in part.__dict__:
        return None
    from strop.rollout.native.kernels import rms_norm

    narrow = narrows(part)

    def forward(hidden: Tensor) -> Tensor:
        own = cast(Tensor, part.weight)
        # A part that hands on 16 bits anyway does so at once.
        return rms_norm(hidden, own, eps, out=own.dtype if narrow else None)

    return forward, len(weight), (type(part), len(weight), weight.dtype, eps)


def _gated(part: nn.Module) -> Found | None:
    parts = dict(part.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"} or "forward" in part.__dict__:
        return None
    if any(child._forward_hooks or child._forward_pre_hooks for child in parts.values()):
        return None
    size = getattr(parts["gate_proj"], "in_features", None)
    if size is None:
        return None
    from strop.rollout.native.kernels import gated_silu

    def forward(hidden: Tensor) -> Tensor:
        return parts["down_proj"](gated_silu(parts["gate_proj"](hidden), parts["up_proj"](hidden)))

    return forward, size, (type(part), type(parts["act_fn"]), size, next(part.parameters()).dtype)


def _wide_head(head: nn.Linear) -> Callable[..., Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        logits = torch.mm(hidden.reshape(-1, hidden.shape[-1]), head.weight.t(), out_dtype=torch.float32)
        if head.bias is not None:
            logits += head.bias
        return logits.view(*hidden.shape[:-1], -1)

    return forward


@torch.no_grad()
def _agrees(part: nn.Module, replacement: Callable[..., Tensor], size: int) -> bool:
    """Whether both give the same numbers, up to the last bits of their dtype."""
    weight = next(part.parameters())
    probe = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        return _close(part.forward(probe), replacement(probe))
    except (RuntimeError, TypeError, ValueError):
        return False


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    scale = expected.float().abs().max().clamp(min=1e-6)
    return bool((expected.float() - found.float()).abs().max() <= 8 * torch.finfo(expected.dtype).eps * scale)


def _faster_rotary(own: Callable[..., Any]) -> Callable[..., Any]:
    from strop.rollout.native.kernels import rotary

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        # Another module of the same family may learn in another thread, and the kernel has no gradient.
        plain = not torch.is_grad_enabled() and not more and not options
        plain = plain and q.dim() == 4 and cos.dim() == 3 and q.dtype == k.dtype == cos.dtype
        if plain and q.is_cuda and q.shape[-1] == k.shape[-1] == cos.shape[-1] and q.stride(-1) == k.stride(-1) == 1:
            return rotary(q, k, cos, sin)
        return own(q, k, cos, sin, *more, **options)

    return apply


@torch.no_grad()
def _rotates_alike(own: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, generator=draw).to(device, dtype) for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    )
    try:
        return all(_close(a, b) for a, b in zip(own(q, k, cos, sin), _faster_rotary(own)(q, k, cos, sin), strict=True))
    except (RuntimeError, TypeError, ValueError):
        return False
