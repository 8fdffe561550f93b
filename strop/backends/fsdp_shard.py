"""What FSDP2 makes a unit of, on which mesh, and in which precision a unit computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from strop.config.schema.model import Fsdp
from strop.models.heads import HEAD
from strop.models.lora import has_adapters

REPLICAS, SHARDS, TENSOR = "replicas", "shards", "tensor"


@dataclass(frozen=True)
class Meshes:
    """How ranks share weights."""

    whole: DeviceMesh
    """[replicas,] shards: every rank of a copy has a piece of its own."""
    layers: DeviceMesh | None = None
    """[replicas,] shards, of the ranks that hold the same part of each divided matrix; None where no matrix is divided."""
    tensor: DeviceMesh | None = None
    """Neighbouring ranks, which hold the parts of each matrix together."""

    @property
    def parts(self) -> int:
        return 1 if self.tensor is None else self.tensor.size()


def make_meshes(device: torch.device, world: int, fsdp_size: int, tensor_parallel: int = 1) -> Meshes:
    whole = make_mesh(device, world, fsdp_size)
    if tensor_parallel == 1:
        return Meshes(whole)
    copies, copy = whole.size() // whole[SHARDS].size(), whole[SHARDS].size()
    if copy % tensor_parallel:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel} does not divide the {copy} ranks that share one copy of the weights "
            f"(fsdp_config.fsdp_size, or all ranks). Set one of {[size for size in range(1, copy + 1) if copy % size == 0]}."
        )
    sizes, names = (copies, copy // tensor_parallel, tensor_parallel), (REPLICAS, SHARDS, TENSOR)
    skip = 1 if copies == 1 else 0
    mesh = init_device_mesh(device.type, sizes[skip:], mesh_dim_names=names[skip:])
    return Meshes(whole, mesh[names[skip:2]], mesh[TENSOR])


def make_mesh(device: torch.device, world: int, fsdp_size: int) -> DeviceMesh:
    """All ranks share one copy of the weights, or groups of `fsdp_size` ranks do and the groups are replicas."""
    if fsdp_size in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARDS,))
    if fsdp_size < 1 or world % fsdp_size:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks (trainer.nnodes x trainer.n_gpus_per_node). "
            f"Set -1 for all of them, or one of {[size for size in range(1, world) if world % size == 0]}."
        )
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=(REPLICAS, SHARDS))


@dataclass(frozen=True)
class Precision:
    """Weights rest in their own dtype, compute in `compute`, and gradients are added up over ranks in `reduce`."""

    compute: torch.dtype
    reduce: torch.dtype = torch.float32

    def policy(self) -> MixedPrecisionPolicy:
        # Inputs are left alone: where the residual stream is kept in float32, a cast at every layer would undo it.
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce, cast_forward_inputs=False)


def shard(module: Any, meshes: Meshes, settings: Fsdp, precision: Precision, head: torch.dtype) -> list[FSDPModule]:
    """Turn the weights of `module` into shards, in place; the units, innermost first and the module itself last.

    A scalar head computes in `head`, because values are regressed on. Losses are parts of a sum over all ranks, so gradients
    are added, not averaged.
    """
    pinned = meshes.whole.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if in_host_memory(settings) else OffloadPolicy()
    units: list[Any] = []
    for part in units_of(module, settings):
        kept = part is getattr(module, HEAD, None)
        policy = Precision(head, precision.reduce).policy() if kept else precision.policy()
        again = None if part is module and settings.reshard_after_forward else settings.reshard_after_forward
        divided = meshes.layers is not None and _has_divided(part, units)
        mesh = meshes.layers if divided else meshes.whole
        fully_shard(part, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=offload)
        # What is not divided is computed alike by the ranks that divide the rest: each of them brings the whole gradient.
        cast(FSDPModule, part).set_gradient_divide_factor(1.0 if divided else float(meshes.parts))
        cast(FSDPModule, part).set_force_sum_reduction_for_comms(True)
        units.append(part)
    if settings.forward_prefetch:
        for unit, following in pairwise(units[:-1]):
            unit.set_modules_to_forward_prefetch([following])
    return units


def _has_divided(part: nn.Module, inner: list[Any]) -> bool:
    """Whether weights that this unit gathers itself are parts of divided matrices."""
    others = {id(weight) for unit in inner for weight in unit.parameters()}
    return any(isinstance(weight, DTensor) for weight in part.parameters() if id(weight) not in others)


def in_host_memory(settings: Fsdp) -> bool:
    """Whether weights, gradients and optimizer rest in host memory; a layer's weights are brought over when it runs."""
    return settings.offload_policy or settings.param_offload or settings.optimizer_offload


def units_of(module: Any, settings: Fsdp) -> Iterator[nn.Module]:
    """Parts that are gathered as one, innermost first: decoder layers (or parts of some size), a scalar head, the rest."""
    policy = settings.wrap_policy
    if policy.min_num_params:
        yield from _large_parts(module, policy.min_num_params)
    else:
        base = module.get_base_model() if has_adapters(module) else module
        names = set(policy.transformer_layer_cls_to_wrap or getattr(base, "_no_split_modules", None) or ())
        found = [part for part in module.modules() if type(part).__name__ in names]
        if not found:
            raise ValueError(
                f"{type(base).__name__} has no layers called {sorted(names) or 'anything known'}. Name the class of its layers "
                "in fsdp_config.wrap_policy.transformer_layer_cls_to_wrap, or set fsdp_config.wrap_policy.min_num_params."
            )
        yield from found
    head = getattr(module, HEAD, None)
    if isinstance(head, nn.Linear):
        yield head
    yield module


def _large_parts(module: nn.Module, least: int) -> list[nn.Module]:
    """Parts with at least `least` weights that no part inside them has taken; embeddings and heads stay with the root,
    because they may be one tensor."""
    taken: set[nn.Parameter] = set()
    chosen: list[nn.Module] = []

    def visit(part: nn.Module, top: bool) -> None:
        for child in part.children():
            visit(child, False)
        own = [weight for weight in part.parameters() if weight not in taken]
        callable_ = not isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Embedding)
        apart = top or not callable_ or any(isinstance(inner, nn.Embedding) for inner in part.modules())
        outputs = getattr(module, "get_output_embeddings", lambda: None)()
        apart = apart or part is outputs or part is getattr(module, HEAD, None)
        if not apart and sum(weight.numel() for weight in own) >= least:
            chosen.append(part)
            taken.update(own)

    visit(module, True)
    return chosen
