"""How ranks divide a model: tensor, pipeline, context, expert and data parallelism.

Ranks are numbered with the tensor-parallel rank fastest, then context, data, and pipeline stage.
megatron-core keeps one division per process in the variables of a module. Models of one run may be divided in
different ways: a topology has its values of these variables, and `activate` sets them before a model is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from strop.backends.megatron.library import megatron
from strop.config.schema.megatron import MegatronConfig
from strop.ranks import STAGE, Ranks


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of one run."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Parts of the model on each pipeline stage."""
    context: int = 1
    expert: int = 1

    @classmethod
    def of(cls, settings: MegatronConfig) -> Sizes:
        return cls(
            settings.tensor_model_parallel_size,
            settings.pipeline_model_parallel_size,
            settings.virtual_pipeline_model_parallel_size or 1,
            settings.context_parallel_size,
            settings.expert_model_parallel_size,
        )


@dataclass(frozen=True)
class Topology:
    """The place of this rank, and the process groups it belongs to."""

    sizes: Sizes
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    data: int
    """Copies of the model, each with its own rows."""
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    gradient_group: dist.ProcessGroup
    """Ranks with the same weights and other rows (or other tokens of them)."""
    expert_gradient_group: dist.ProcessGroup
    """The same for the weights of experts."""
    stages: tuple[DeviceMesh, ...] = field(repr=False)
    """Per pipeline stage, its ranks: [1, tensor, data x context]."""
    expert_stages: tuple[DeviceMesh, ...] = field(repr=False)
    """The same for experts: [1, expert, all other ranks of the stage]."""
    variables: Mapping[str, object] = field(repr=False)
    """Of megatron-core's parallel_state."""

    def activate(self) -> None:
        """megatron-core divides models in this way from now on."""
        vars(megatron("parallel_state")).update(self.variables)

    @property
    def is_first(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.sizes.pipeline - 1

    @property
    def place(self) -> str:
        """Which part of the model and of the rows this rank has, for messages; counted from 0."""
        return (
            f"pipeline stage {self.pipeline_rank} of {self.sizes.pipeline}, tensor-parallel rank "
            f"{self.tensor_rank} of {self.sizes.tensor}, data-parallel rank {self.data_rank} of {self.data}"
        )

    @property
    def reports(self) -> bool:
        """Of the ranks that work on the same rows, one reports the results."""
        return self.is_last and self.tensor_rank == 0 and self.context_rank == 0


_joined: dict[Sizes, Topology] = {}
_blank: dict[str, object] = {}


def join(sizes: Sizes, ranks: Ranks, device: torch.device) -> Topology:
    """The topology of these sizes, activated. Every rank must call it."""
    known = _joined.get(sizes)
    if known is not None:
        known.activate()
        return known
    refuse_sizes(sizes, ranks.world)
    if not dist.is_initialized():
        _join_alone(device)
    state = megatron("parallel_state")
    if not _blank:
        _blank.update(_variables(state))
    vars(state).update(_blank)
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    _seed()
    per_stage = ranks.world // sizes.pipeline
    stages = []
    expert_stages = []
    for stage in range(sizes.pipeline):
        members = torch.arange(stage * per_stage, (stage + 1) * per_stage)
        own = members.view(-1, sizes.tensor).T.contiguous()
        stages.append(DeviceMesh(device.type, own[None], mesh_dim_names=(STAGE, "tensor", "data")))
        experts = members.view(-1, sizes.expert).T.contiguous()
        expert_stages.append(DeviceMesh(device.type, experts[None], mesh_dim_names=(STAGE, "expert", "rest")))
    topology = Topology(
        sizes,
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        context_rank=state.get_context_parallel_rank(),
        data_rank=state.get_data_parallel_rank(),
        data=state.get_data_parallel_world_size(),
        tensor_group=state.get_tensor_model_parallel_group(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        context_group=state.get_context_parallel_group(),
        gradient_group=state.get_data_parallel_group(with_context_parallel=True),
        expert_gradient_group=state.get_expert_data_parallel_group(),
        stages=tuple(stages),
        expert_stages=tuple(expert_stages),
        variables=_variables(state),
    )
    _joined[sizes] = topology
    return topology


def _variables(state: ModuleType) -> dict[str, object]:
    """What megatron-core remembers about the division of ranks."""
    found: dict[str, object] = {}
    for name, value in vars(state).items():
        if name.startswith("_") and not name.startswith("__") and not isinstance(value, FunctionType | type):
            found[name] = list(value) if isinstance(value, list) else value
    return found


def _seed() -> None:
    """megatron-core keeps random states for dropout, which we never use, and refuses to run without them."""
    before = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    megatron("tensor_parallel").model_parallel_cuda_manual_seed(0)
    torch.set_rng_state(before)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)


def _join_alone(device: torch.device) -> None:
    """megatron-core needs a process group, also of one rank. Outputs are summed on the CPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def refuse_sizes(sizes: Sizes, world: int) -> None:
    """Refuse sizes whose product does not divide the number of ranks."""
    model = sizes.tensor * sizes.pipeline * sizes.context
    if world % model:
        raise ValueError(
            f"tensor x pipeline x context parallel sizes are {sizes.tensor} x {sizes.pipeline} x "
            f"{sizes.context} = {model}, which does not divide the {world} ranks (trainer.nnodes x "
            "trainer.n_gpus_per_node)."
        )
    if (world // sizes.pipeline) % sizes.expert:
        raise ValueError(
            f"expert_model_parallel_size={sizes.expert} does not divide the {world // sizes.pipeline} ranks "
            "of a pipeline stage."
        )
