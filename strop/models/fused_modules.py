"""Fused kernels for RMS norms, rotary embeddings and gated MLPs on a GPU with Triton (models/kernels.py).

Most decoders share these formulas. A module that has one gets a subclass whose forward is the kernel, but
only where a self-check saw that kernel and module give the same numbers and gradients. Weights, names and the
state dict do not change. models/patches.py applies and undoes what is found here.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.extras import MissingExtra, require
from strop.models.changes import subclass
from strop.models.residual import narrows
from strop.models.self_check import same

DEVICES = ("cuda",)
ROTARY = "apply_rotary_pos_emb"
RUNS_AS_KERNEL = "runs_as_kernel"
"""Attribute of fused classes."""
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PROBE = 48
"""Inner width of the gated MLP that is checked."""

Kind = tuple[object, ...]
"""What a self-check depends on: modules of one kind share its result."""
ModuleClass = type[nn.Module]
Replacement = tuple[nn.Module, ModuleClass]
"""A module and the class that it is to have."""
Rotate = Callable[..., tuple[Tensor, Tensor]]

_checked: dict[Kind, ModuleClass | None] = {}
"""Fused classes by what they replace; None where the kernel gives other numbers."""


def runs_as_kernel(part: nn.Module) -> bool:
    """Whether this module was given a fused class."""
    return getattr(type(part), RUNS_AS_KERNEL, False)


@cache
def _kernels() -> ModuleType | None:
    try:
        return require("strop.models.kernels", extra="gpu", why="Fast training on a GPU")
    except MissingExtra as error:
        warnings.warn(
            f"{error} Norms, rotary embeddings and gates run as plain torch, which is slower.", stacklevel=3
        )
        return None


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fused kernels can be used on this device in this precision."""
    return device.type in DEVICES and dtype != torch.float64 and _kernels() is not None


def _plain(part: nn.Module) -> bool:
    return "forward" not in part.__dict__ and not runs_as_kernel(part)


def _replacements(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    kind_of: Callable[[nn.Module], Kind | None],
    fused_if_same: Callable[[nn.Module, torch.device, torch.dtype], ModuleClass | None],
) -> Iterator[Replacement]:
    """Modules with a kind, and their fused classes. The self-check `fused_if_same` runs once per kind."""
    for part in model.modules():
        kind = kind_of(part)
        if kind is None:
            continue
        key = (*kind, device, dtype)
        if key not in _checked:
            _checked[key] = fused_if_same(part, device, dtype)
        fused = _checked[key]
        if fused is not None:
            yield part, fused


# --- RMS norms ----------------------------------------------------------------------------------------------


def fused_norms(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[Replacement]:
    """RMS norms of `model` that a kernel computes, with their fused classes."""
    return _replacements(model, device, dtype, norm_kind, _norm_if_same)


def norm_epsilon(part: nn.Module) -> float | None:
    found = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if isinstance(found, float):
        return found
    return None


def norm_kind(part: nn.Module) -> Kind | None:
    weight = getattr(part, "weight", None)
    if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return None
    if weight.dim() != 1 or not _plain(part):
        return None
    if getattr(part, "bias", None) is not None or norm_epsilon(part) is None:
        return None
    return type(part), weight.shape[0], norm_epsilon(part)


def norm_twin(part: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """A norm with random weights for a self-check, and its size."""
    size = len(cast(Tensor, part.weight))
    twin = copy.copy(part)
    weight = 1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    twin._parameters = {"weight": nn.Parameter(weight.to(device, dtype))}
    return twin, size


def _norm_if_same(part: nn.Module, device: torch.device, dtype: torch.dtype) -> ModuleClass | None:
    twin, size = norm_twin(part, device, dtype)
    fused = _fused_norm(type(part))
    if _agree(twin, size, fused, device, dtype):
        return fused
    return None


def _fused_norm(own: ModuleClass) -> ModuleClass:
    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        kernels = _kernels()
        weight = self.weight
        if kernels is None or hidden.device.type not in DEVICES or isinstance(weight, DTensor):
            result: Tensor = own.forward(self, hidden)
            return result
        # A norm that returns 16 bits anyway rounds inside the kernel.
        narrow = cast(Tensor, weight).dtype if narrows(self) else None
        out: Tensor = kernels.rms_norm(hidden, weight, norm_epsilon(self), out=narrow)
        return out

    return subclass(own, forward, RUNS_AS_KERNEL)


# --- gated MLPs ---------------------------------------------------------------------------------------------


def fused_gated_mlps(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[Replacement]:
    """Gated MLPs of `model` whose activation a kernel computes, with their fused classes."""
    return _replacements(model, device, dtype, gated_kind, _gated_if_same)


def gated_kind(part: nn.Module) -> Kind | None:
    children = dict(part.named_children())
    if set(children) != _GATED or not _plain(part):
        return None
    return type(part), type(children["act_fn"])


def gated_twin(part: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """A small gated MLP with random weights for a self-check, and its size."""
    twin = copy.copy(part)
    children: dict[str, nn.Module | None] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name in ("gate_proj", "up_proj"):
            children[name] = nn.Linear(_PROBE, 2 * _PROBE).to(device, dtype)
        children["down_proj"] = nn.Linear(2 * _PROBE, _PROBE).to(device, dtype)
    children["act_fn"] = cast(nn.Module, part.act_fn)
    twin._modules = children
    return twin, _PROBE


def _gated_if_same(part: nn.Module, device: torch.device, dtype: torch.dtype) -> ModuleClass | None:
    twin, size = gated_twin(part, device, dtype)
    fused = _fused_gated(type(part))
    if _agree(twin, size, fused, device, dtype):
        return fused
    return None


def _fused_gated(own: ModuleClass) -> ModuleClass:
    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        kernels = _kernels()
        if kernels is None or hidden.device.type not in DEVICES:
            result: Tensor = own.forward(self, hidden)
            return result
        inner = kernels.gated_silu(_call(self.gate_proj, hidden), _call(self.up_proj, hidden))
        return _call(self.down_proj, inner)

    return subclass(own, forward, RUNS_AS_KERNEL)


def _call(layer: object, states: Tensor) -> Tensor:
    out: Tensor = cast(nn.Module, layer)(states)
    return out


def _agree(plain: nn.Module, size: int, fused: ModuleClass, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether module and kernel give the same output and gradients, up to the last bits of their dtype."""
    draw = torch.Generator().manual_seed(0)
    probe = torch.randn(9, size, generator=draw).to(device, dtype)
    above = torch.randn(9, size, generator=draw).to(device, dtype)
    faster = copy.copy(plain)
    faster.__class__ = fused
    return same(lambda: _with_gradients(plain, probe, above), lambda: _with_gradients(faster, probe, above))


def _with_gradients(part: nn.Module, probe: Tensor, above: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        hidden = probe.clone().requires_grad_()
        out = part.forward(hidden)
        inputs = [hidden, *part.parameters()]
        return [out, *torch.autograd.grad(out, inputs, above)]


# --- rotary embeddings --------------------------------------------------------------------------------------


def fused_rotary(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[ModuleType, Rotate]]:
    """Python modules of the classes of `model` whose rotary function a kernel computes, with the function
    that is to replace it (or has replaced it already, for another model)."""
    for name in sorted({type(part).__module__ for part in model.modules()}):
        home = sys.modules[name]
        own = vars(home).get(ROTARY)
        if own is None:
            continue
        if hasattr(own, "replaced"):
            yield home, own
            continue
        faster = _fused_rotate(own)
        if _rotates_alike(own, faster, device, dtype):
            yield home, faster


def _rotates_alike(own: Rotate, faster: Rotate, device: torch.device, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 1, 5, 8))
    q, k, cos, sin, *above = (torch.randn(*shape, generator=draw).to(device, dtype) for shape in shapes)

    def rotated(rotate: Rotate) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [q.clone().requires_grad_(), k.clone().requires_grad_()]
            out = rotate(*inputs, cos, sin)
            return [*out, *torch.autograd.grad(out, inputs, above)]

    try:
        rotated(own)
    except (RuntimeError, TypeError):  # it takes other arguments: those of gpt-oss have half the size
        return False
    return same(lambda: rotated(own), lambda: rotated(faster))


def _fused_rotate(own: Rotate) -> Rotate:
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        kernels = _kernels()
        usual = q.device.type in DEVICES and not more and not options and q.dim() == 4 and cos.dim() == 3
        same_dtype = q.dtype == k.dtype == cos.dtype
        same_size = q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if kernels is not None and usual and same_dtype and same_size:
            rotated: tuple[Tensor, Tensor] = kernels.rotary(q, k, cos, sin)
            return rotated
        return own(q, k, cos, sin, *more, **options)

    apply.replaced = own  # type: ignore[attr-defined] # functions take attributes; the stubs do not say so
    return apply
