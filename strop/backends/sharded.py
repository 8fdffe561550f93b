"""Tensors of which every rank holds a piece: which piece, and how a whole tensor becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.backends.optimizer import MasterWeights

Region = tuple[slice, ...]


def region(tensor: DTensor) -> Region:
    """Which part of the whole tensor is here."""
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))


def shard_like(value: Any, like: Tensor) -> Tensor:
    """`value`, a whole tensor or one that can `read` a region of itself from a file, divided as `like` is."""
    if not isinstance(like, DTensor):
        return cast(Tensor, value if isinstance(value, Tensor) else value.read())
    if isinstance(value, DTensor):
        return value
    here = region(like)
    local = value[here] if isinstance(value, Tensor) else value.read(here)
    return DTensor.from_local(
        local.to(like.device).contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


@torch.no_grad()
def fill(target: Tensor, value: Any) -> None:
    """Copy a whole tensor, a saved one, or one divided alike into `target`."""
    target.copy_(shard_like(value, target))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The piece that is here; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: Tensor, ranks: int) -> int:
    """By how many of the `ranks` that share one copy of a model each piece of a tensor is held."""
    if not isinstance(tensor, DTensor):
        return ranks
    pieces = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        pieces *= 1 if placement.is_replicate() else size
    return ranks // pieces


class ShardedWeights(MasterWeights):
    """The trained parameters of a sharded module. A shard is its own master: FSDP rounds it when it gathers it."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device):
        self.parameters = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.masters = dict(self.parameters)
        self.group, self.device = group, device

    @property
    def gradients(self) -> list[Tensor]:
        """The pieces that are here; writing to them changes the gradient."""
        return [local(master.grad) for master in self.masters.values() if master.grad is not None]

    def gradient_norm(self) -> float:
        """Every piece counts once, by however many ranks of the group it is held."""
        norms = torch._foreach_norm(self.gradients, 2, dtype=torch.float32) if self.gradients else []
        square = torch.zeros((), dtype=torch.float64)
        if norms:
            held = [copies(m.grad, self.group.size()) for m in self.masters.values() if m.grad is not None]
            squares = torch.stack(list(norms)).double().square()
            square = (squares / torch.tensor(held, device=squares.device)).sum()
        square = square.to(self.device)
        dist.all_reduce(square, group=self.group)
        return float(square.sqrt())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Any]) -> None:
        for name, master in self.masters.items():
            fill(master, tensors[name])

    def to(self, device: torch.device | str) -> None:
        """The masters are the module's own weights and move with it."""
