"""A decode step of Mamba layers in the precision of a pass over whole rows.

transformers computes a row in float32 and a step of one token in the precision of the model: it rounds the
state, its input and the output to 16 bits where the pass over a row does not. Sampled log-probs then differ
from recomputed ones by more than the rounding of the layers around. The functions here do what the pass over
a row does, in the place of those of transformers, where these are plain torch (mamba-ssm is not installed).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.models.layouts.mixers import mixers_of

_users: Counter[tuple[str, str]] = Counter()
"""Models that use a function of this file, by the Python module and the name that it has there."""


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """In the precision of the model, as over whole rows."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt.float()


def mamba2_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The output [rows, heads, size] in float32; `state` [rows, heads, size, N] is updated."""
    step = _time_step(dt, dt_bias, dt_softplus)
    repeats = hidden_states.shape[1] // B.shape[1]
    keys = B.float().repeat_interleave(repeats, 1)
    queries = C.float().repeat_interleave(repeats, 1)
    x = hidden_states.float()
    new = state.float() * (step[..., None] * A.float()).exp() + (x * step)[..., None] * keys[:, :, None]
    state.copy_(new)
    out = (new * queries[:, :, None]).sum(-1)
    if D is not None:
        out = out + x * D
    if z is not None:
        out = out * F.silu(z)
    return out


def mamba_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The output [rows, channels] in float32; `state` [rows, channels, N] is updated."""
    step = _time_step(dt, dt_bias, dt_softplus)[..., None]
    change = step * B.float()[:, None] * hidden_states.float()[..., None]
    new = state.float() * (step * A.float()).exp() + change
    state.copy_(new)
    # Over whole rows, this product alone is in the precision of the model.
    out = torch.matmul(new.to(hidden_states.dtype), C[..., None])[..., 0].float()
    if D is not None:
        out = out + hidden_states * D.float()
    if z is not None:
        out = out * F.silu(z)
    return out


_STEPS: dict[str, Callable[..., Tensor]] = {
    "mamba2_selective_state_update": mamba2_step,
    "mamba_selective_state_update": mamba_step,
}


class SetStep:
    """A function of a Python module of transformers. Models of one family share it: the last one restores
    it."""

    def __init__(self, home: ModuleType, name: str) -> None:
        self._home = home
        self._name = name

    def do(self) -> None:
        _users[self._home.__name__, self._name] += 1
        setattr(self._home, self._name, _STEPS[self._name])

    def undo(self) -> None:
        key = (self._home.__name__, self._name)
        _users[key] -= 1
        if not _users[key]:
            setattr(self._home, self._name, _own[key])

    def can_undo(self) -> bool:
        return True


_own: dict[tuple[str, str], Callable[..., Tensor]] = {}
"""The functions of transformers, by the Python module and the name."""


def wide_steps(model: nn.Module) -> Iterator[SetStep]:
    """The steps of the mixers of a model that this file has in more precision."""
    if find_spec("mamba_ssm") is not None:
        return
    homes = sorted({type(mixer).__module__ for mixer in mixers_of(model)})
    for home in homes:
        for name in _STEPS:
            if name in vars(sys.modules[home]):
                _own.setdefault((home, name), vars(sys.modules[home])[name])
                yield SetStep(sys.modules[home], name)
