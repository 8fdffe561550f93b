"""Master weights of a model divided by Megatron, under their Hugging Face names.

The optimizer works on Hugging Face weights in the master precision; Megatron's fused parameters are rounded
copies of them. So checkpoints, moving averages and exports know nothing of how a model is divided. Each
master is a DTensor over the ranks of its pipeline stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from strop.backends.fsdp.sharded import RegionReader, copies, fill, local
from strop.backends.megatron.names import Place
from strop.backends.megatron.topology import Topology
from strop.backends.optimizer import MasterWeights


class StageWeights(MasterWeights):
    """The trained weights of this rank's stage."""

    def __init__(
        self,
        places: Mapping[str, Place],
        shapes: Mapping[str, torch.Size],
        topology: Topology,
        *,
        master: torch.dtype,
        distributed: bool,
        frozen: Collection[str] = (),
    ):
        """`shapes` are the whole shapes of all weights of the model, by Hugging Face name. `frozen` ones have
        masters in the precision of their parameters, until `forget_masters`. `distributed`: masters are
        divided over data-parallel ranks too (ZeRO-1)."""
        self.places = dict(places)
        self.shapes = shapes
        self.topology = topology
        self.master = master
        self.distributed = distributed and topology.data * topology.sizes.context > 1
        self.masters = {}
        self.parameters = {}
        self._hooks = []
        self._pending: dict[int, Tensor] = {}
        self._last_names: dict[int, str] = {}
        """Of the weights that are parts of a parameter, the last one."""
        self.frozen = frozenset(frozen) & self.places.keys()
        for name, place in self.places.items():
            dtype = place.part.parameter.dtype if name in self.frozen else master
            self.masters[name] = self._as_master(name, place.read().to(dtype, copy=True)).requires_grad_()
            self._last_names[id(place.part.parameter)] = name

    @property
    def alone(self) -> bool:
        """Whether this rank has the whole model, and there is no other rank."""
        return dist.get_world_size() == 1

    # --- distribution ---------------------------------------------------------------------------------------

    def _layout(self, name: str, stage: int, dtype: torch.dtype) -> DTensorSpec:
        """How the master of a weight is divided over the ranks of a stage."""
        place = self.places[name]
        mesh = (self.topology.expert_stages if place.expert else self.topology.stages)[stage]
        divided: Placement = Replicate() if place.dim is None else Shard(place.dim)
        rest: Placement = Shard(0) if self.distributed else Replicate()
        return _spec(mesh, (Replicate(), divided, rest), self.shapes[name], dtype)

    def _as_master(self, name: str, share: Tensor) -> Tensor:
        """This rank's share of a weight as a master."""
        if self.alone:
            return share
        spec = self._layout(name, self.topology.pipeline_rank, share.dtype)
        return DTensor(self._own_rows(spec, share), spec, requires_grad=False)

    def _own_rows(self, spec: DTensorSpec, share: Tensor) -> Tensor:
        """What this rank keeps of the share that its data-parallel ranks have in common."""
        if not self.distributed:
            return share
        group = spec.mesh.get_group(2)
        rows = share.tensor_split(_bounds(share.shape[0], group.size()))
        return rows[group.rank()].clone()

    # --- gradients ------------------------------------------------------------------------------------------

    def collect_gradients(self) -> None:
        """From now on gradients of Megatron's parameters are summed in the master precision."""
        seen: set[int] = set()
        for name in self.masters:
            parameter = self.places[name].part.parameter
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add))

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        pending = self._pending.get(id(parameter))
        if pending is None:
            self._pending[id(parameter)] = parameter.grad.to(self.master)
        else:
            pending.add_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Add what the last passes left on all ranks to the gradients of the masters; every rank calls it."""
        for name, master in self.masters.items():
            place = self.places[name]
            share = self._pending_share(name)
            if place.partial_gradient and self.topology.sizes.tensor > 1:
                dist.all_reduce(share, group=self.topology.tensor_group)
            self._add_tied(name, share)
            group = self.topology.gradient_group
            if place.expert:
                group = self.topology.expert_gradient_group
            if group.size() > 1:
                dist.all_reduce(share, group=group)
            if isinstance(master, DTensor):
                share = DTensor(self._own_rows(master._spec, share), master._spec, requires_grad=False)
            if master.grad is None:
                master.grad = share
            else:
                local(master.grad).add_(local(share))

    def _pending_share(self, name: str) -> Tensor:
        """The gradient of this rank's share. What no other weight needs is not kept."""
        place = self.places[name]
        parameter = place.part.parameter
        pending = self._pending.get(id(parameter))
        if pending is None:
            # A rank without rows has a gradient too: that of the others.
            pending = torch.zeros_like(parameter, dtype=self.master)
        if name == self._last_names[id(parameter)]:
            self._pending.pop(id(parameter), None)
        return place.read(pending)

    def _add_tied(self, name: str, share: Tensor) -> None:
        """The embedding of the first stage is also the head of the last: the sum of both gradients."""
        if not self.tied_over_stages or name != "model.embed_tokens.weight":
            return
        group = self.topology.pipeline_group
        ends = [0, group.size() - 1]
        other = ends[1] if group.rank() == 0 else ends[0]
        received = torch.empty_like(share)
        peer = dist.get_global_rank(group, other)
        sending = dist.P2POp(dist.isend, share.clone(), peer, group)
        receiving = dist.P2POp(dist.irecv, received, peer, group)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        share.add_(received)

    @property
    def tied_over_stages(self) -> bool:
        """Whether the embedding and the output head are one weight on two stages."""
        ends = self.topology.is_first or self.topology.is_last
        tied = "lm_head.weight" not in self.shapes and "score.weight" not in self.shapes
        return tied and ends and self.topology.sizes.pipeline > 1

    @property
    def gradients(self) -> list[Tensor]:
        """The shards of this rank; writing to them changes the gradient."""
        return [local(gradient) for gradient in super().gradients]

    def gradient_norm(self) -> float:
        """Every weight counts once, however many ranks hold it."""
        by_copies: dict[int, list[Tensor]] = {}
        for name, master in self.masters.items():
            if master.grad is None or self.places[name].copy_of_other_stage:
                continue
            held = 1
            if isinstance(master, DTensor):
                held = copies(master, master.device_mesh.size())
            if local(master.grad).numel():
                by_copies.setdefault(held, []).append(local(master.grad))
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for held, gradients in by_copies.items():
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            square = square + norms.double().square().sum() / held
        dist.all_reduce(square)
        return float(square.sqrt())

    @property
    def _device(self) -> torch.device:
        return next(local(master).device for master in self.masters.values())

    def clear_gradients(self) -> None:
        self._pending.clear()
        for master in self.masters.values():
            master.grad = None

    # --- weights --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into Megatron's parameters."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, master in self.masters.items():
            part = self.places[name].part
            targets.append(part.view(part.parameter.data))
            sources.append(self._gathered(master))
            if self.distributed:  # not all gathered weights at once
                torch._foreach_copy_(targets, sources)
                targets, sources = [], []
        if targets:
            torch._foreach_copy_(targets, sources)

    def _gathered(self, master: Tensor) -> Tensor:
        """This rank's share of a weight, with the rows of other data-parallel ranks."""
        if not self.distributed or not isinstance(master, DTensor):
            return local(master)
        group = master.device_mesh.get_group(2)
        spec = master._spec
        whole = list(master.shape)
        place = spec.placements[1]
        if isinstance(place, Shard):
            pieces = spec.mesh.size(1)
            size = -(-whole[place.dim] // pieces)
            rank = spec.mesh.get_local_rank(1)
            whole[place.dim] = max(0, min(size, whole[place.dim] - rank * size))
        rows = torch.empty(whole, dtype=master.dtype, device=local(master).device)
        parts = list(rows.tensor_split(_bounds(whole[0], group.size())))
        shapes = [part.shape for part in parts]
        sent = [torch.empty(shape, dtype=rows.dtype, device=rows.device) for shape in shapes]
        for source, piece in enumerate(sent):
            if source == group.rank():
                piece.copy_(local(master))
            dist.broadcast(piece, group=group, group_src=source)
        return torch.cat(sent)

    def whole(self, name: str, added: Tensor | None = None) -> Tensor:
        """A whole weight in the precision of the parameters, gathered from the ranks of its stage: all of
        them must call it. `added`: of an adapter, to this rank's share."""
        place = self.places[name]
        share = place.read()
        if added is not None:
            share = (share.float() + added).to(share.dtype)
        if place.dim is None or self.alone:
            return share
        spec = self._layout(name, self.topology.pipeline_rank, share.dtype)
        gathered = (Replicate(), Shard(place.dim), Replicate())
        plain = _spec(spec.mesh, gathered, self.shapes[name], share.dtype)
        return DTensor(share, plain, requires_grad=False).full_tensor()

    def held(self) -> dict[str, Tensor]:
        """What this rank has of every weight of its stage: masters, or the frozen weights."""
        found: dict[str, Tensor] = {}
        for name, place in self.places.items():
            if name in self.masters:
                found[name] = self.masters[name].detach()
            else:
                found[name] = self._as_master(name, place.read())
        return found

    def elsewhere(self, name: str, stage: int, dtype: torch.dtype) -> Tensor:
        """A weight of another stage, of which this rank has nothing."""
        mesh = self.topology.stages[stage]
        spec = _spec(mesh, (Replicate(),) * mesh.ndim, self.shapes[name], dtype)
        return DTensor(torch.empty(0, dtype=dtype), spec, requires_grad=False)

    def forget_masters(self) -> None:
        """Of frozen weights, whose parameters are all they need."""
        for name in self.frozen:
            self.places[name].part.parameter.requires_grad_(False)
            del self.masters[name]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor | RegionReader]) -> None:
        for name, master in self.masters.items():
            fill(master, tensors[name])
        self.publish()

    def to(self, device: torch.device | str) -> None:
        for master in self.masters.values():
            master.data = master.data.to(device)
            master.grad = None if master.grad is None else master.grad.to(device)


def _spec(mesh: Any, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))


def _bounds(rows: int, pieces: int) -> list[int]:
    """Where a dimension of `rows` is cut, as a sharded DTensor is."""
    size = -(-rows // pieces)
    return [min(rows, size * piece) for piece in range(1, pieces)]
