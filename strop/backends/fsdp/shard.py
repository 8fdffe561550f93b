"""Sharding a module with FSDP2: device meshes, units and their precision, and loading weights into the shards
of a module on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from strop.backends.fsdp.experts import experts_of
from strop.backends.fsdp.sharded import Region, fill
from strop.config.schema.model import FsdpConfig
from strop.models.build import allocate
from strop.models.files.weights import open_weights, weight_files
from strop.models.heads import HEAD
from strop.models.load import WeightFiles
from strop.models.lora import has_adapters
from strop.ranks import Ranks

REPLICAS, SHARDS, TENSOR, EXPERTS = "replicas", "shards", "tensor", "experts"


@dataclass(frozen=True)
class Meshes:
    """Device meshes: how ranks share weights."""

    whole: DeviceMesh
    """[replicas,] shards: every rank of a replica has a shard of its own."""
    layers: DeviceMesh | None = None
    """[replicas,] shards, of the ranks with the same part of each tensor-parallel matrix, or with the same
    experts; None without tensor and expert parallelism."""
    tensor: DeviceMesh | None = None
    """Neighbouring ranks that divide each matrix between them (tensor parallelism)."""
    experts: DeviceMesh | None = None
    """Neighbouring ranks that divide the experts of a layer between them (expert parallelism)."""

    @property
    def tensor_parallel(self) -> int:
        if self.tensor is None:
            return 1
        return self.tensor.size()


def make_meshes(device: torch.device, world: int, settings: FsdpConfig, tensor_parallel: int = 1) -> Meshes:
    """The meshes of a run. All ranks must call it."""
    whole = make_mesh(device, world, settings.fsdp_size)
    expert_parallel = settings.expert_parallel_size
    if tensor_parallel > 1 and expert_parallel > 1:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel} and fsdp_config.expert_parallel_size={expert_parallel}: "
            "ranks share matrices or experts, not both. Set one of them to 1."
        )
    if tensor_parallel > 1:
        return Meshes(whole, *_divide(whole, TENSOR, "tensor_parallel_size", tensor_parallel))
    if expert_parallel > 1:
        layers, experts = _divide(whole, EXPERTS, "fsdp_config.expert_parallel_size", expert_parallel)
        return Meshes(whole, layers, experts=experts)
    return Meshes(whole)


def _divide(whole: DeviceMesh, name: str, key: str, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of ranks with the same part of divided weights, and that of the `size` neighbouring ranks that
    divide them."""
    ranks = whole[SHARDS].size()
    if ranks % size:
        raise ValueError(
            f"{key}={size} does not divide the {ranks} ranks that share one copy of the weights "
            f"(fsdp_config.fsdp_size, or all ranks). Set one of {_divisors(ranks)}."
        )
    replicas = whole.size() // ranks
    sizes: tuple[int, ...] = (ranks // size, size)
    names: tuple[str, ...] = (SHARDS, name)
    if replicas > 1:
        sizes = (replicas, *sizes)
        names = (REPLICAS, *names)
    mesh = init_device_mesh(whole.device_type, sizes, mesh_dim_names=names)
    return mesh[names[:-1]], mesh[name]


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def make_mesh(device: torch.device, world: int, fsdp_size: int) -> DeviceMesh:
    """All ranks share one copy of the weights, or groups of `fsdp_size` ranks do: the groups are replicas."""
    if fsdp_size == -1 or fsdp_size >= world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARDS,))
    if fsdp_size < 1 or world % fsdp_size:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks (trainer.nnodes x "
            f"trainer.n_gpus_per_node). Set -1 for all of them, or one of {_divisors(world)[:-1]}."
        )
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=(REPLICAS, SHARDS))


@dataclass(frozen=True)
class Precision:
    """Shards are stored in their own dtype, computed with in `compute`, and gradients are summed over ranks
    in `reduce`."""

    compute: torch.dtype
    reduce: torch.dtype = torch.float32

    def policy(self) -> MixedPrecisionPolicy:
        # Inputs are left alone: where the residual stream is kept in float32, a cast at every layer would
        # undo it.
        return MixedPrecisionPolicy(
            param_dtype=self.compute, reduce_dtype=self.reduce, cast_forward_inputs=False
        )


def shard(
    module: nn.Module, meshes: Meshes, settings: FsdpConfig, precision: Precision, head: torch.dtype
) -> list[FSDPModule]:
    """Turn the weights of `module` into shards, in place; returns the units of FSDP2, innermost first and the
    module itself last.

    A scalar head computes in `head`, because values are regressed on. Losses are terms of a sum over all
    ranks, so gradients are summed, not averaged.
    """
    offload = OffloadPolicy()
    if is_offloaded(settings):
        offload = CPUOffloadPolicy(pin_memory=meshes.whole.device_type == "cuda")
    # Experts that ranks divide are sharded over fewer ranks than the rest of their layer.
    experts = experts_of(module) if meshes.experts is not None else []
    units: list[nn.Module] = []
    for part in dict.fromkeys([*experts, *units_of(module, settings)]):
        policy = precision.policy()
        if part is getattr(module, HEAD, None):
            policy = Precision(head, precision.reduce).policy()
        reshard: bool | None = settings.reshard_after_forward
        if part is module and reshard:
            reshard = None
        mesh = meshes.whole
        factor = float(meshes.tensor_parallel)
        if meshes.layers is not None and _has_divided(part, units):
            mesh = meshes.layers
            factor = 1.0
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
        unit = cast(FSDPModule, part)
        # Weights that tensor parallelism does not divide have the whole gradient on each of its ranks.
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(True)
        units.append(part)
    found = [cast(FSDPModule, unit) for unit in units]
    if settings.forward_prefetch:
        for unit, following in pairwise(found[len(experts) : -1]):
            unit.set_modules_to_forward_prefetch([following])
    return found


def _has_divided(part: nn.Module, inner: list[nn.Module]) -> bool:
    """Whether weights that this unit gathers itself are parts of tensor-parallel matrices, or some of the
    experts."""
    gathered_inside: set[int] = set()
    for unit in inner:
        gathered_inside |= {id(weight) for weight in unit.parameters()}
    own = (weight for weight in part.parameters() if id(weight) not in gathered_inside)
    return any(isinstance(weight, DTensor) for weight in own)


def is_offloaded(settings: FsdpConfig) -> bool:
    """Whether weights, gradients and optimizer state stay in host memory (CPU offload); the weights of a
    layer are copied to the device when it runs."""
    return settings.offload_policy or settings.param_offload or settings.optimizer_offload


def units_of(module: Any, settings: FsdpConfig) -> Iterator[nn.Module]:
    """The modules of which each is one all-gather, innermost first: decoder layers (or modules of some size),
    a scalar head, the rest."""
    policy = settings.wrap_policy
    if policy.min_num_params:
        yield from _large_parts(module, policy.min_num_params)
    else:
        base = module
        if has_adapters(module):
            base = module.get_base_model()
        names = set(policy.transformer_layer_cls_to_wrap or getattr(base, "_no_split_modules", None) or ())
        found = [part for part in module.modules() if type(part).__name__ in names]
        if not found:
            raise ValueError(
                f"{type(base).__name__} has no layers called {sorted(names) or 'anything known'}. Name the "
                "class of its layers in fsdp_config.wrap_policy.transformer_layer_cls_to_wrap, or set "
                "fsdp_config.wrap_policy.min_num_params."
            )
        yield from found
    head = getattr(module, HEAD, None)
    if isinstance(head, nn.Linear):
        yield head
    yield module


def _large_parts(module: nn.Module, minimum: int) -> list[nn.Module]:
    """Modules with at least `minimum` weights that no module inside them has taken. Embeddings and heads stay
    with the root, because they may be one tensor."""
    taken: set[nn.Parameter] = set()
    chosen: list[nn.Module] = []
    outputs = getattr(module, "get_output_embeddings", lambda: None)()
    heads = (outputs, getattr(module, HEAD, None))

    def may_be_unit(part: nn.Module) -> bool:
        if part is module or any(part is head for head in heads):
            return False
        if isinstance(part, nn.ModuleList | nn.ModuleDict):  # they are not called
            return False
        return not any(isinstance(inner, nn.Embedding) for inner in part.modules())

    def visit(part: nn.Module) -> None:
        for child in part.children():
            visit(child)
        own = [weight for weight in part.parameters() if weight not in taken]
        if may_be_unit(part) and sum(weight.numel() for weight in own) >= minimum:
            chosen.append(part)
            taken.update(own)

    visit(module)
    return chosen


# --- weights for a sharded module on the meta device --------------------------------------------------------
#
# No rank ever holds all weights in the precision they are trained in. Where the safetensors files of the
# folder name the weights as the module does, every rank reads its own slices and nothing else. In all other
# cases (GGUF, fused experts, new heads, LoRA adapters) rank 0 loads the model as one process would, in the
# precision of the files, and broadcasts it one weight at a time.


class SavedSlices:
    """One tensor of a safetensors file, of which any region can be read."""

    def __init__(self, opened: Any, name: str):
        self._view = opened.get_slice(name)
        self.shape = tuple(self._view.get_shape())

    def read(self, region: Region | None = None) -> Tensor:
        found: Tensor = self._view[region or (slice(None),) * len(self.shape)]
        return found


def saved_slices(folder: Path) -> dict[str, SavedSlices]:
    """Every tensor in the safetensors files of a model folder, by name; empty where there are none."""
    found: dict[str, SavedSlices] = {}
    for file in weight_files(folder):
        opened = open_weights(folder / file)
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            found[name] = SavedSlices(opened, name)
    return found


def weight_loader(
    source: WeightFiles,
    load_whole: Callable[[], nn.Module],
    ranks: Ranks,
    device: torch.device,
    *,
    new: bool,
    storage: torch.device,
) -> Callable[[nn.Module], None]:
    """A function that loads weights into a sharded module on the meta device.

    `load_whole` makes the same module with all of its weights; `new`: some of them are in no file. Shards are
    stored on `storage`, buffers on `device`.
    """

    def load(module: nn.Module) -> None:
        allocate(module, device, storage)
        weights = dict(module.named_parameters())
        saved: dict[str, SavedSlices] = {}
        if not new and not source.gguf_file:
            saved = ranks.run_or_raise_on_all(lambda: saved_slices(Path(source.name)), "reading the model")
        if all(ranks.all_gather_object(_fits(weights, saved))):
            ranks.run_or_raise_on_all(lambda: _fill(weights, saved), "reading the model's weights")
            return
        loaded = ranks.run_or_raise_on_all(lambda: whole(weights), "loading the model")
        broadcast_weights(weights, loaded, device)

    def whole(weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """All weights, on rank 0."""
        if not ranks.is_rank0:
            return None
        found: dict[str, Tensor] = dict(load_whole().named_parameters())
        if lost := sorted(found.keys() - weights.keys()):
            raise ValueError(
                f"The files of {source.name!r} have weights that its config.json leaves out: {lost[:3]}. If "
                "that is an output head, set model.override_config.tie_word_embeddings=false."
            )
        return found

    return load


def _fits(weights: Mapping[str, Tensor], saved: Mapping[str, SavedSlices]) -> bool:
    """Whether every weight is in the files, with its shape."""
    if not saved:
        return False
    for name, weight in weights.items():
        if name not in saved or saved[name].shape != tuple(weight.shape):
            return False
    return True


def _fill(weights: Mapping[str, Tensor], saved: Mapping[str, SavedSlices]) -> None:
    for name, weight in weights.items():
        fill(weight, saved[name])


@torch.no_grad()
def broadcast_weights(
    weights: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None, device: torch.device
) -> None:
    """Every rank keeps its shard of the weights of rank 0 (`whole`), which are sent one at a time."""
    for name, weight in weights.items():
        dtype: list[Any] = [None if whole is None else whole[name].dtype]
        dist.broadcast_object_list(dtype, src=0)
        if whole is None:
            sent = torch.empty(weight.shape, dtype=dtype[0])
        else:
            sent = whole[name].detach().contiguous()
        sent = sent.to(device)
        dist.broadcast(sent, src=0)
        fill(weight, sent)
