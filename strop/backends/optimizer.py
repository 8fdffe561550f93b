"""Weights in two precisions, and the update between them.

The module computes with weights in the compute precision (usually bf16). The optimizer moves masters in the master precision
(fp32), because an update of 1e-6 relative size vanishes when it is added to a bf16 number. Gradients of micro-batches are
summed in the masters' precision as they appear, one parameter at a time. Where both precisions are the same, a weight is its
own master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.algorithms.schedules import make_scheduler, warmup_length
from strop.config.schema.model import Optim
from strop.registry import load_attribute


class MasterWeights:
    """The trained parameters of a module by name, each with its master copy."""

    def __init__(self, module: nn.Module, *, compute: torch.dtype, master: torch.dtype, keep: frozenset[str] = frozenset()):
        """Casts the module's parameters to `compute`, except those named in `keep`; buffers stay as they are."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            narrow = master if name in keep else compute
            if parameter.requires_grad:
                copy = parameter.detach().to(master)
                parameter.data = copy if narrow == master else copy.to(narrow)
                self.parameters[name] = parameter
                self.masters[name] = parameter if narrow == master else copy.requires_grad_()
                if narrow != master:
                    parameter.register_post_accumulate_grad_hook(_sum_into(self.masters[name]))
            else:
                parameter.data = parameter.data.to(narrow)

    @property
    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def gradient_norm(self) -> float:
        """Euclidean norm of all gradients together, in fp32."""
        norms = torch._foreach_norm(self.gradients, 2, dtype=torch.float32) if self.gradients else []
        return float(torch.linalg.vector_norm(torch.stack(list(norms)))) if norms else 0.0

    @torch.no_grad()
    def multiply_gradients(self, factor: float) -> None:
        torch._foreach_mul_(self.gradients, factor)

    @torch.no_grad()
    def clip(self, norm: float, limit: float | None) -> None:
        """Scale the gradients so that their norm is at most `limit`."""
        if limit is not None and norm > limit:
            self.multiply_gradients(limit / norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module's weights."""
        moved = [name for name, master in self.masters.items() if master is not self.parameters[name]]
        if moved:
            torch._foreach_copy_([self.parameters[name].data for name in moved], [self.masters[name] for name in moved])

    def clear_gradients(self) -> None:
        for name, master in self.masters.items():
            master.grad = None
            self.parameters[name].grad = None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(tensors[name])
        self.publish()

    def to(self, device: torch.device | str) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.data = master.data.to(device)
                master.grad = None if master.grad is None else master.grad.to(device)


def _sum_into(master: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add


def make_optimizer(named: Mapping[str, Tensor], settings: Optim) -> Optimizer:
    """The optimizer of `settings` over these tensors. Weight decay leaves biases and norms (one dimension) alone."""
    # One kernel takes many tensors at once, but not tensors that are divided over different ranks.
    sorts: dict[tuple[float, Any], list[Tensor]] = {}
    for tensor in sorted(named.values(), key=lambda tensor: tensor.dim() <= 1):
        decay = settings.weight_decay if tensor.dim() > 1 else 0.0
        sorts.setdefault((decay, getattr(tensor, "device_mesh", None)), []).append(tensor)
    groups = [{"params": tensors, "weight_decay": decay} for (decay, _), tensors in sorts.items()]
    cls = load_attribute(settings.optimizer_impl, settings.optimizer)
    arguments: dict[str, Any] = {"lr": settings.lr}
    if "adam" in settings.optimizer.lower():
        arguments |= {"betas": tuple(settings.betas), "eps": settings.eps}
    if cls in (torch.optim.AdamW, torch.optim.Adam):
        arguments["fused"] = True
    arguments |= dict(settings.override_optimizer_config or {})
    try:
        return cls(groups, **arguments)
    except TypeError as error:
        raise ValueError(
            f"{settings.optimizer_impl}.{settings.optimizer} does not take the arguments {sorted(arguments)}: {error}. "
            f"Change override_optimizer_config."
        ) from error


def make_schedule(optimizer: Optimizer, settings: Optim) -> LambdaLR:
    """The learning rate per trainer step."""
    total = settings.total_training_steps
    if total < 1 and settings.lr_warmup_steps < 0 and settings.lr_warmup_steps_ratio > 0:
        raise ValueError(
            f"lr_warmup_steps_ratio={settings.lr_warmup_steps_ratio} is a share of total_training_steps, which is not known "
            f"({total}). Set total_training_steps or lr_warmup_steps."
        )
    known = {"total_steps": total} if total >= 1 else {}
    return make_scheduler(
        optimizer,
        settings.lr_scheduler_type,
        warmup_steps=warmup_length(max(total, 0), steps=settings.lr_warmup_steps, ratio=settings.lr_warmup_steps_ratio),
        min_ratio=settings.min_lr_ratio or 0.0,
        num_cycles=settings.num_cycles,
        **known,
    )


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """What the optimizer remembers of each tensor, by name."""
    return {name: dict(optimizer.state[tensor]) for name, tensor in named.items() if tensor in optimizer.state}


def load_optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> None:
    """The exact contrary; tensors are copied to where their parameter is."""
    for name, tensor in named.items():
        if name not in state:
            optimizer.state.pop(tensor, None)
            continue
        remembered = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state[name].items()}
        optimizer.state[tensor] = _moved(optimizer, remembered, tensor.device)


def move_optimizer(optimizer: Optimizer, device: torch.device | str) -> None:
    for remembered in optimizer.state.values():
        remembered.update(_moved(optimizer, remembered, device))


def _moved(optimizer: Optimizer, remembered: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    # Unless it is fused, torch counts steps on the CPU, wherever the weights are.
    fixed = () if optimizer.defaults.get("fused") or optimizer.defaults.get("capturable") else ("step",)
    return {
        key: value.to(device) if isinstance(value, Tensor) and key not in fixed else value for key, value in remembered.items()
    }
