"""Exponential moving average of named tensors: the smoothed weights that a run may export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class EMA:
    """average ← decay · average + (1 - decay) · value, kept in float32 whatever the dtype of the values.

    With bfloat16 averages an update of a few thousandths would be rounded away. Integer and boolean tensors
    (buffers that count) are copied, not averaged.
    """

    def __init__(
        self,
        named: Named,
        *,
        decay: float = 0.992,
        device: torch.device | str | None = None,
        fill: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ):
        """`fill(average, saved)` overwrites an average with a saved one; needed if averages are not plain
        tensors."""
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"The EMA decay must lie between 0 and 1, it is {decay}.")
        self.decay = decay
        self.updates = 0
        self._fill = fill
        self.average = {name: _keep(value, device) for name, value in _items(named)}

    @torch.no_grad()
    def update(self, named: Named) -> None:
        """Move the averages towards these tensors."""
        values = dict(_items(named))
        self._check(values)
        for name, average in self.average.items():
            value = values[name].detach().to(average)
            if average.is_floating_point():
                average.lerp_(value, 1.0 - self.decay)
            else:
                average.copy_(value)
        self.updates += 1

    @torch.no_grad()
    def copy_to(self, named: Named) -> None:
        """Overwrite the given tensors with the averages, in their own dtype and on their own device."""
        values = dict(_items(named))
        self._check(values)
        for name, value in values.items():
            value.copy_(self.average[name])

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "updates": self.updates, "average": dict(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages. The decay stays that of the configuration."""
        self._check(state["average"])
        self.updates = int(state["updates"])
        for name, value in state["average"].items():
            self._fill(self.average[name], value)

    def _check(self, values: Mapping[str, Tensor]) -> None:
        missing = sorted(self.average.keys() - values.keys())
        unknown = sorted(values.keys() - self.average.keys())
        if missing or unknown:
            raise ValueError(
                f"The EMA was made of other tensors: missing {missing[:5]}, not known {unknown[:5]}."
            )
        for name, value in values.items():
            if value.shape != self.average[name].shape:
                raise ValueError(
                    f"The EMA of {name!r} has shape {tuple(self.average[name].shape)}, the tensor "
                    f"{tuple(value.shape)}."
                )


def _items(named: Named) -> Iterable[tuple[str, Tensor]]:
    if isinstance(named, Mapping):
        return named.items()
    return named


def _keep(value: Tensor, device: torch.device | str | None) -> Tensor:
    dtype = value.dtype
    if value.is_floating_point():
        dtype = torch.float32
    return value.detach().to(device=device or value.device, dtype=dtype, copy=True)
