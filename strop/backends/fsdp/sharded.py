"""Sharded tensors: which shard is on this rank, and how a whole tensor becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.backends.optimizer import MasterWeights

Region = tuple[slice, ...]


class RegionReader(Protocol):
    """A tensor in a file, of which any region can be read."""

    def read(self, region: Region | None = None) -> Tensor: ...


def region(tensor: DTensor) -> Region:
    """Which part of the whole tensor is on this rank."""
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))


def shard_like(value: Tensor | RegionReader, like: Tensor) -> Tensor:
    """A whole tensor, or one in a file, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return value if isinstance(value, Tensor) else value.read()
    if isinstance(value, DTensor):
        return value
    place = region(like)
    piece = value[place] if isinstance(value, Tensor) else value.read(place)
    return DTensor.from_local(
        piece.to(like.device).contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


@torch.no_grad()
def fill(target: Tensor, value: Tensor | RegionReader) -> None:
    """Copy a whole tensor, a saved one, or one sharded alike into `target`."""
    target.copy_(shard_like(value, target))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, by an all-gather: every rank must call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank; it shares memory with the tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of the `ranks` that share one copy of a model hold each shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks
    pieces = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if not placement.is_replicate():
            pieces *= size
    return ranks // pieces


class ShardedWeights(MasterWeights):
    """The trained parameters of a sharded module. A shard is its own master: FSDP rounds it in the
    all-gather."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device):
        self.parameters = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.masters = dict(self.parameters)
        self.group = group
        self.device = device

    @property
    def gradients(self) -> list[Tensor]:
        """The shards of this rank; writing to them changes the gradient."""
        return [local(gradient) for gradient in super().gradients]

    def gradient_norm(self) -> float:
        """Every shard counts once, however many ranks of the group hold it."""
        square = torch.zeros((), dtype=torch.float64)
        if self.gradients:
            norms = torch._foreach_norm(self.gradients, 2, dtype=torch.float32)
            held = [copies(gradient, self.group.size()) for gradient in super().gradients]
            squares = torch.stack(list(norms)).double().square()
            square = (squares / torch.tensor(held, device=squares.device)).sum()
        square = square.to(self.device)
        dist.all_reduce(square, group=self.group)
        return float(square.sqrt())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor | RegionReader]) -> None:
        for name, master in self.masters.items():
            fill(master, tensors[name])

    def to(self, device: torch.device | str) -> None:
        """The masters are the module's own weights and move with it."""
