"""Where two tables of numbers differ first, bit for bit: NaN equals NaN, and nothing is close enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    tensor: str
    place: tuple[int, ...]
    """Of the first difference; (row, token) in tables of tokens. Empty: the shapes differ."""
    recorded: str
    now: str
    count: int = 0
    total: int = 0
    largest: float = 0.0
    """Largest absolute difference."""

    def __str__(self) -> str:
        if not self.place:
            return f"{self.tensor}: recorded {self.recorded}, now {self.now}"
        names = ("row", "token") if len(self.place) == 2 else ("place",) * len(self.place)
        where = ", ".join(f"{name} {index}" for name, index in zip(names, self.place))
        return (
            f"{self.tensor}, {where}: recorded {self.recorded}, now {self.now} "
            f"({self.count} of {self.total} values differ, by {self.largest:.3g} at most)"
        )


def difference(name: str, recorded: Tensor, now: Tensor) -> Difference | None:
    """The first place, in the order of memory, at which two tensors differ."""
    recorded, now = recorded.detach().cpu(), now.detach().cpu()
    if recorded.shape != now.shape or recorded.dtype != now.dtype:
        return Difference(name, (), f"{list(recorded.shape)} {recorded.dtype}", f"{list(now.shape)} {now.dtype}")
    unlike = (recorded != now) & ~(recorded.isnan() & now.isnan()) if recorded.is_floating_point() else recorded != now
    if not bool(unlike.any()):
        return None
    place = tuple(unlike.nonzero()[0].tolist())
    gaps = (recorded[unlike].double() - now[unlike].double()).abs()
    return Difference(
        name,
        place or (0,),
        _shown(recorded[place]),
        _shown(now[place]),
        count=int(unlike.sum()),
        total=unlike.numel(),
        largest=float(gaps.nan_to_num(torch.inf).max()),
    )


def differences(recorded: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[Difference]:
    """In the order of what was recorded; a tensor that is missing on one side is a difference, too."""
    found = []
    for name, tensor in recorded.items():
        if name not in now:
            found.append(Difference(name, (), f"{list(tensor.shape)} {tensor.dtype}", "nothing"))
        elif (gap := difference(name, tensor, now[name])) is not None:
            found.append(gap)
    added = [name for name in now if name not in recorded]
    return found + [Difference(name, (), "nothing", f"{list(now[name].shape)} {now[name].dtype}") for name in added]


def _shown(value: Tensor) -> str:
    """Enough digits to tell two neighbours apart."""
    return f"{value.item():.9g}" if value.is_floating_point() else str(value.item())
