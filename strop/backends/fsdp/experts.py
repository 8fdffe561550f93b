"""Expert parallelism (Lepikhin et al. 2020): the experts of a layer divided over ranks.

Each of the ranks holds some of the experts, and computes them for the tokens of all ranks. A token is sent to
the ranks of the experts that the router chose for it, and the results come back, both by an all-to-all. So no
rank gathers the weights of all experts, however many ranks there are.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from strop.models.lora import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "fsdp_config.expert_parallel_size"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in config.json."""
_ARGUMENTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]
_EXPERT_DIMENSIONS = 3


def expert_count(config: PreTrainedConfig) -> int:
    """Experts of a layer; 0 for a model that has none."""
    for name in EXPERT_COUNTS:
        found = getattr(config, name, None)
        if found:
            return int(found)
    return 0


def refuse_experts(config: PreTrainedConfig, size: int) -> str | None:
    """Why the experts of such a model cannot be divided over `size` ranks; None if they can."""
    count = expert_count(config)
    if size == 1:
        return None
    if not count:
        return f"{size}, but {config.model_type} has no experts. Set 1."
    if count % size:
        fitting = [one for one in range(1, count + 1) if count % one == 0]
        return f"{size} does not divide the {count} experts of a layer. Set one of {fitting}."
    return None


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer, each matrix of all experts in one tensor."""
    found = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        has_matrices = any(weight.dim() == _EXPERT_DIMENSIONS for weight in own)
        if has_matrices and list(inspect.signature(type(module).forward).parameters) == _ARGUMENTS:
            found.append(module)
    return found


def divide_experts(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over the ranks of a mesh of one dimension, in place; returns the
    modules that hold them. Every rank has all weights, or none: the model is on the meta device."""
    if has_adapters(model):
        raise ValueError(
            f"{KEY}={mesh.size()} does not go together with LoRA. Set it to 1: frozen weights are sharded."
        )
    problem = refuse_experts(model.config.get_text_config(), mesh.size())
    if problem is not None:
        raise ValueError(f"{KEY}: {problem}")
    modules = experts_of(model)
    if not modules:
        raise ValueError(
            f"{KEY}={mesh.size()}: transformers does not keep the experts of {type(model).__name__} in one "
            "tensor per matrix. Set 1."
        )
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
        module.forward = functools.partial(_forward, module, type(module).forward, mesh)
    return modules


class _OwnExperts:
    """A module of experts as its forward sees it on one rank: fewer experts, plain tensors."""

    def __init__(self, module: nn.Module, ranks: int):
        self._module = module
        self.num_experts = cast(int, module.num_experts) // ranks
        self.weights: dict[str, Tensor] = {}
        for name, weight in module.named_parameters(recurse=False):
            self.weights[name] = weight.to_local() if isinstance(weight, DTensor) else weight

    def __getattr__(self, name: str) -> Any:
        return self.weights[name] if name in self.weights else getattr(self._module, name)


def _forward(
    module: nn.Module, compute: Any, mesh: DeviceMesh, states: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """`states` [tokens, width], the `chosen` experts of each token and the `shares` of their results."""
    group = mesh.get_group()
    own = _OwnExperts(module, mesh.size())
    tokens, per_token = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    experts = chosen.flatten()[order]
    sent = torch.bincount(experts // own.num_experts, minlength=mesh.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    here = (tuple(received.tolist()), tuple(sent.tolist()))  # rows that come in, rows that go out
    back = (here[1], here[0])
    inputs = cast(Tensor, _RowExchange.apply(states[order // per_token], here, group))
    local = _exchange(experts % own.num_experts, here, group)
    outputs = _compute(own, compute, inputs, local)
    results = cast(Tensor, _RowExchange.apply(outputs, back, group))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    by_token = results[places].view(tokens, per_token, -1)
    return (by_token * shares.unsqueeze(-1)).sum(dim=1).to(states.dtype)


def _compute(own: _OwnExperts, compute: Any, inputs: Tensor, local: Tensor) -> Tensor:
    if len(inputs):
        ones = torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device)
        return cast(Tensor, compute(own, inputs, local.unsqueeze(-1), ones))
    # No token came: the weights still need a gradient, which is summed with that of other ranks.
    nothing = sum((weight.flatten()[:1].sum() * 0.0 for weight in own.weights.values()), torch.zeros(()))
    return inputs + nothing


Rows = tuple[tuple[int, ...], tuple[int, ...]]


def _exchange(tensor: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """Send the next rows[1][i] rows to rank i of the group, and receive rows[0][i] from it."""
    found = tensor.new_empty(sum(rows[0]), *tensor.shape[1:])
    dist.all_to_all_single(found, tensor.contiguous(), list(rows[0]), list(rows[1]), group=group)
    return found


class _RowExchange(torch.autograd.Function):
    """An all-to-all of rows, whose gradients go the way back."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
        context.rows = rows
        context.group = group
        return _exchange(tensor, rows, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        received, sent = context.rows
        return _exchange(gradients[0], (sent, received), context.group), None, None
