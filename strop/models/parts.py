"""Norms, rotary embeddings and gated activations of a decoder in one kernel each, on a GPU with Triton.

They are a handful of formulas that most decoders share, written in a dozen kernels each. `quicken` gives the modules that have
such a part a class of their own, whose forward is the kernel. But only where kernel and part were seen to give the same
numbers and gradients; whatever they do not match stays as it is. Weights, names and the state dict do not change. Residual sums
move into the products beside them (residual.py).
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.extras import MissingExtra, require
from strop.models.precision import narrows
from strop.models.residual import fuse_residual

DEVICES = ("cuda",)
_ROTARY = "apply_rotary_pos_emb"
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PROBE = 48
"""Inner width of the gated part that is tried."""
_quick: dict[tuple[object, ...], type[nn.Module] | None] = {}
"""Classes by what they replace; None where the kernel gives other numbers."""


def quicken(model: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Let the parts of `model` that can do so run as kernels. `device` and `dtype`: where it computes, if not where it is."""
    first = next(model.parameters())
    device, dtype = device or first.device, dtype or first.dtype
    if device.type not in DEVICES or dtype == torch.float64:
        return
    fuse_residual(model)
    if _kernels() is None:
        return
    for part in model.modules():
        for kind_of, make, twin_of in ((_norm_kind, _quick_norm, _norm_twin), (_gated_kind, _quick_gated, _gated_twin)):
            kind = kind_of(part)
            if kind is None:
                continue
            key = (*kind, device, dtype)
            if key not in _quick:
                quick = make(type(part))
                _quick[key] = quick if _agree(twin_of(part, device, dtype), quick, device, dtype) else None
            found = _quick[key]
            if found is not None:
                part.__class__ = found
    for name in {type(part).__module__ for part in model.modules()}:
        _quicken_rotary(sys.modules[name], device, dtype)


def runs_as_kernel(part: nn.Module) -> bool:
    return getattr(type(part), "runs_as_kernel", False)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up as one kernel, for parts that run as one."""
    kernels = _kernels()
    assert kernels is not None
    out: Tensor = kernels.gated_silu(gate, up)
    return out


@cache
def _kernels() -> ModuleType | None:
    try:
        return require("strop.models.kernels", extra="gpu", why="Fast training on a GPU")
    except MissingExtra as error:
        warnings.warn(f"{error} Norms, rotary embeddings and gates run as plain torch, which is slower.", stacklevel=3)
        return None


def _plain(part: nn.Module) -> bool:
    return "forward" not in part.__dict__ and not runs_as_kernel(part)


# --- norms -------------------------------------------------------------------------------------------------------------------


def _epsilon(part: nn.Module) -> float | None:
    found = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    return found if isinstance(found, float) else None


def _norm_kind(part: nn.Module) -> tuple[object, ...] | None:
    weight = getattr(part, "weight", None)
    if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1 or not _plain(part):
        return None
    if getattr(part, "bias", None) is not None or _epsilon(part) is None:
        return None
    return type(part), weight.shape[0], _epsilon(part)


def _norm_twin(part: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, int]:
    size = len(part.weight)  # type: ignore[arg-type]
    twin = copy.copy(part)
    weight = 1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    twin._parameters = {"weight": nn.Parameter(weight.to(device, dtype))}
    return twin, size


def _quick_norm(own: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        kernels, weight = _kernels(), self.weight
        if kernels is None or hidden.device.type not in DEVICES or isinstance(weight, DTensor):
            result: Tensor = own.forward(self, hidden)
            return result
        # A part that hands on 16 bits anyway does so at once.
        out: Tensor = kernels.rms_norm(hidden, weight, _epsilon(self), out=weight.dtype if narrows(self) else None)
        return out

    return _subclass(own, forward)


# --- gated activations -------------------------------------------------------------------------------------------------------


def _gated_kind(part: nn.Module) -> tuple[object, ...] | None:
    parts = dict(part.named_children())
    if set(parts) != _GATED or not _plain(part):
        return None
    return type(part), type(parts["act_fn"])


def _gated_twin(part: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, int]:
    twin = copy.copy(part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wide = {name: nn.Linear(_PROBE, 2 * _PROBE) for name in ("gate_proj", "up_proj")}
        children = {**wide, "down_proj": nn.Linear(2 * _PROBE, _PROBE)}
    twin._modules = {name: child.to(device, dtype) for name, child in children.items()}
    twin._modules["act_fn"] = part.act_fn  # type: ignore[assignment]
    return twin, _PROBE


def _quick_gated(own: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        kernels = _kernels()
        if kernels is None or hidden.device.type not in DEVICES:
            result: Tensor = own.forward(self, hidden)
            return result
        out: Tensor = self.down_proj(kernels.gated_silu(self.gate_proj(hidden), self.up_proj(hidden)))
        return out

    return _subclass(own, forward)


def _subclass(own: type[nn.Module], forward: Callable[..., Tensor]) -> type[nn.Module]:
    facts = {"forward": forward, "runs_as_kernel": True, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (own,), facts)


def _agree(tried: tuple[nn.Module, int], quick: type[nn.Module], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether part and kernel give the same output and gradients, up to the last bits of their dtype."""
    part, size = tried
    draw = torch.Generator().manual_seed(0)
    probe, above = (torch.randn(9, size, generator=draw).to(device, dtype) for _ in range(2))
    faster = copy.copy(part)
    faster.__class__ = quick
    return same(lambda: _with_gradients(part, probe, above), lambda: _with_gradients(faster, probe, above))


def _with_gradients(part: nn.Module, probe: Tensor, above: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        hidden = probe.clone().requires_grad_()
        out = part.forward(hidden)
        wanted = [hidden, *part.parameters()]
        return [out, *torch.autograd.grad(out, wanted, above)]


# --- rotary embeddings -------------------------------------------------------------------------------------------------------


def _quicken_rotary(home: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    own = vars(home).get(_ROTARY)
    if own is None or hasattr(own, "replaced"):
        return
    faster = _quick_rotary(own)
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 1, 5, 8))
    q, k, cos, sin, *above = (torch.randn(*shape, generator=draw).to(device, dtype) for shape in shapes)

    def turned(rotate: Callable[..., Any]) -> list[Tensor]:
        with torch.enable_grad():
            wanted = [q.clone().requires_grad_(), k.clone().requires_grad_()]
            out = rotate(*wanted, cos, sin)
            return [*out, *torch.autograd.grad(out, wanted, above)]

    if same(lambda: turned(own), lambda: turned(faster)):
        setattr(home, _ROTARY, faster)


def _quick_rotary(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        kernels = _kernels()
        plain = q.device.type in DEVICES and not more and not options and q.dim() == 4 and cos.dim() == 3
        if kernels is not None and plain and q.dtype == k.dtype == cos.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            return kernels.rotary(q, k, cos, sin)
        return own(q, k, cos, sin, *more, **options)

    apply.replaced = own  # type: ignore[attr-defined]
    return apply


# --- comparing ---------------------------------------------------------------------------------------------------------------


def same(plain: Callable[[], list[Tensor]], quick: Callable[[], list[Tensor]]) -> bool:
    """Whether two ways to compute the same give the same, up to the last bits of their dtype."""
    with warnings.catch_warnings():
        # The first backward pass of a process says that it finds no context yet, and makes one.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
        expected = plain()
    try:
        return all(_close(a, b) for a, b in zip(expected, quick(), strict=True))
    except Exception as error:  # noqa: BLE001 - a compiler may refuse in many ways; plain torch always works
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"A kernel does not run here, plain torch does its work: {reason}", stacklevel=2)
        return False


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    scale = expected.detach().float().abs().max().clamp(min=1e-6)
    return bool((expected.float() - found.float()).abs().max() <= 8 * torch.finfo(expected.dtype).eps * scale)
