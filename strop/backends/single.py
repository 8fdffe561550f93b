"""Training on one device: the specification of every other backend."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.backends.base import Loss, MicroBatching, Outputs, StepInfo
from strop.backends.micro import on_device, partition
from strop.backends.nonfinite import NonFiniteLoss, suspects
from strop.backends.optimizer import (
    MasterWeights,
    load_optimizer_state,
    make_optimizer,
    make_schedule,
    move_optimizer,
    optimizer_state,
)
from strop.backends.parking import Parking
from strop.backends.scaling import LossScale
from strop.backends.thrift import Thrift
from strop.config.schema.model import Optim
from strop.models.forward import response_outputs
from strop.models.heads import HEAD
from strop.models.lora import adapters_off, has_adapters, merged_weights
from strop.models.parts import quicken
from strop.models.sequence_parallel import Slicing
from strop.ranks import Ranks
from strop.types import Batch, pad_columns


class SingleBackend:
    """One model on one device. Its module computes in `compute`; masters and optimizer state are kept in `master`.

    Without `optim` the model is frozen and only answers. Give the module in its best precision: masters are made of it before
    it is rounded.
    """

    ranks = Ranks()
    slicing: Slicing | None = None

    def __init__(
        self,
        module: Any,
        *,
        optim: Optim | None = None,
        device: torch.device | str = "cpu",
        compute: torch.dtype = torch.float32,
        master: torch.dtype = torch.float32,
        grad_clip: float | None = 1.0,
        temperature: float = 1.0,
        packed: bool = True,
        attention: str | None = None,
        offload_activations: bool = False,
        park_model: bool = False,
        park_optimizer: bool = False,
    ):
        """With `park_model` the module waits in host memory between passes, with `park_optimizer` masters and optimizer do
        between the updates of one step and the next."""
        self._refuse_half(optim, master)
        self.module = module
        self.thrift = Thrift()
        self.device = torch.device(device)
        self.compute = compute
        self.scaling = LossScale() if compute == torch.float16 else None
        self.temperature, self.grad_clip = temperature, grad_clip
        self.packed, self.attention, self.offload_activations = packed, attention, offload_activations
        if optim is None:
            module.requires_grad_(False)
        keep = frozenset(name for name, _ in module.named_parameters() if HEAD in name.split(".")[:-1])
        module.to(self.device)
        self.weights = MasterWeights(module, compute=compute, master=master, keep=keep)
        quicken(module)
        self.optimizer = None if optim is None else make_optimizer(self.weights.masters, optim)
        self.schedule = None if optim is None or self.optimizer is None else make_schedule(self.optimizer, optim)
        self.parking = Parking(self, model=park_model, optimizer=park_optimizer and optim is not None)
        self.parking.park()

    @staticmethod
    def _refuse_half(optim: Optim | None, master: torch.dtype) -> None:
        if optim is not None and master == torch.float16:
            raise ValueError(
                "Updates vanish in fp16 masters. Set fsdp_config.model_dtype=fp32; fsdp_config.dtype may be float16."
            )

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        with self.parking.passing():
            return self.thrift.tried(micro, batch.lengths, lambda smaller: self._forward(batch, want, smaller))

    def forward_backward(self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching) -> dict[str, float]:
        assert self.optimizer is not None, "a frozen model has no gradients"
        self.parking.begin_update()
        fresh = not self.weights.gradients  # else a second try would lose what was collected before this call

        def attempt(smaller: MicroBatching) -> dict[str, float]:
            while True:
                if fresh:
                    self.weights.clear_gradients()
                found = self._forward_backward(batch, want, loss, smaller)
                if self.scaling is None or not fresh or math.isfinite(self.weights.gradient_norm()):
                    return found
                if not self.scaling.shrink():
                    return found  # `step` will leave the weights alone

        return self.thrift.tried(micro, batch.lengths, attempt, again=fresh)

    @property
    def out_of_memory(self) -> int:
        return self.thrift.count

    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        self.module.eval()
        width = batch.mask.shape[1]
        tables: dict[str, Tensor] = {}
        with torch.no_grad():
            for rows in partition(batch, micro):
                for name, found in self._ask(batch.select(rows), want).items():
                    wide = found.dim() == 2
                    table = tables.setdefault(name, torch.zeros(len(batch), width) if wide else torch.zeros(len(batch)))
                    table[rows] = (pad_columns(found, width) if wide else found).float().cpu()
        return Outputs(**tables)

    def _forward_backward(self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching) -> dict[str, float]:
        self.module.train()
        parts = partition(batch, micro)
        losses, reports = [], []
        for rows in parts:
            piece = batch.select(rows)
            with self._activations():
                outputs = Outputs(**self._ask(piece, want))
                value, sums = loss(outputs, on_device(piece, self.device))
            self._scaled(value).backward()
            losses.append(value.detach())
            reports.append({name: number.detach() for name, number in sums.items()})
        # One look at the end: a look per micro-batch would make the device wait each time.
        found = torch.stack(losses).float().cpu()
        if not found.isfinite().all():
            self.weights.clear_gradients()
            self._explain(batch, want, parts, found)
        return summed(reports)

    def step(self) -> StepInfo:
        assert self.optimizer is not None, "a frozen model takes no steps"
        lr, scale = self.learning_rate, None if self.scaling is None else self.scaling.value
        if scale is not None:
            self.weights.multiply_gradients(1 / scale)
        norm = self.weights.gradient_norm()
        usable = math.isfinite(norm)
        if usable:
            self.weights.clip(norm, self.grad_clip)
            self.optimizer.step()
            self.weights.publish()
        if self.scaling is not None:
            self.scaling.stepped() if usable else self.scaling.shrink()
        self.weights.clear_gradients()
        return StepInfo(grad_norm=norm, lr=lr, skipped=not usable, loss_scale=scale)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaling is None else loss * self.scaling.value

    @property
    def learning_rate(self) -> float:
        return 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    def advance_schedule(self) -> None:
        assert self.schedule is not None, "a frozen model has no schedule"
        with _quiet_about_order():
            self.schedule.step()
        self.parking.park()

    def reference(self) -> AbstractContextManager[None]:
        """Inside it the model answers without its adapters: the model before training."""
        return adapters_off(self.module)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        if has_adapters(self.module):
            yield from merged_weights(self.module)
            return
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, by parameter name: copy them before the next step. With adapters, only what is trained."""
        model = {name: master.detach() for name, master in self.weights.masters.items()}
        if not has_adapters(self.module):
            frozen = {name: p.detach() for name, p in self.module.named_parameters() if name not in model}
            persistent = set(self.module.state_dict())
            buffers = {name: b for name, b in self.module.named_buffers() if name in persistent}
            model |= frozen | buffers
        state: dict[str, Any] = {"model": model}
        if self.optimizer is not None and self.schedule is not None:
            state["optimizer"] = optimizer_state(self.optimizer, self.weights.masters)
            state["schedule"] = {"step": self.schedule.last_epoch}
            if self.scaling is not None:
                state["loss_scale"] = self.scaling.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`model` must name exactly the weights of this one; `optimizer` and `schedule` may be left out."""
        own, given = self.state_dict()["model"], state["model"]
        self._refuse_other(own, given)
        with torch.no_grad():
            for name in own.keys() - self.weights.masters.keys():
                own[name].copy_(given[name])
        self.weights.load(given)
        if self.optimizer is not None and "optimizer" in state:
            load_optimizer_state(self.optimizer, self.weights.masters, state["optimizer"])
        self._load_progress(state)

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        if self.schedule is not None and "schedule" in state:
            set_schedule(self.schedule, state["schedule"]["step"])
        if self.scaling is not None and "loss_scale" in state:
            self.scaling.load(state["loss_scale"])

    @staticmethod
    def _refuse_other(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        if own.keys() != given.keys():
            missing, strange = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
            raise ValueError(
                f"The saved weights are not those of this model: {len(missing)} are missing ({missing[:3]}), {len(strange)} "
                f"are unknown ({strange[:3]}). Were the model or lora_rank changed?"
            )
        wrong = [name for name in own if own[name].shape != given[name].shape]
        if wrong:
            name = wrong[0]
            raise ValueError(f"{name} was saved with shape {tuple(given[name].shape)} and is {tuple(own[name].shape)} here.")

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Park the model, the optimizer (masters included), or both in host memory."""
        self._move(torch.device("cpu"), model, optimizer)

    def onload(self, *, model: bool = True, optimizer: bool = True) -> None:
        self._move(self.device, model, optimizer)

    def _move(self, device: torch.device, model: bool, optimizer: bool) -> None:
        if model:
            self.module.to(device)
        if optimizer:
            self.weights.to(device)
            if self.optimizer is not None:
                move_optimizer(self.optimizer, device)

    def _ask(self, piece: Batch, want: Sequence[str]) -> dict[str, Tensor]:
        return response_outputs(
            self.module,
            piece,
            want,
            temperature=self.temperature,
            packed=self.packed,
            attention=self.attention,
            slicing=self.slicing,
        )

    def _activations(self) -> AbstractContextManager[Any]:
        """Where tensors wait for the backward pass; weights are there anyway and are not parked."""
        if not self.offload_activations or self.device.type == "cpu":
            return contextlib.nullcontext()

        def park(tensor: Tensor) -> tuple[torch.device, Tensor]:
            stays = is_weight(tensor) or tensor.numel() < 4096
            return tensor.device, tensor if stays else tensor.to("cpu", non_blocking=False)

        return torch.autograd.graph.saved_tensors_hooks(park, lambda parked: parked[1].to(parked[0]))

    def _explain(
        self, batch: Batch, want: Sequence[str], parts: list[list[int]], losses: Tensor, ranks: Sequence[int] = ()
    ) -> None:
        """Weights have not moved, so asking again shows which rows the model fails on."""
        rows: list[int] = []
        causes: set[str] = set()
        for part, value in zip(parts, losses, strict=True):
            if value.isfinite():
                continue
            piece = batch.select(part)
            outputs = self.forward(piece, [name for name in want if name != "auxiliary"], MicroBatching(rows=len(part)))
            tables = {name: table for name, table in vars(outputs).items() if table is not None}
            places, names = suspects(piece, tables)
            rows += [part[place] for place in places] or part
            causes |= set(names)
        ids = range(len(batch)) if batch.row_ids is None else batch.row_ids.tolist()
        raise NonFiniteLoss(sorted(ids[row] for row in rows), sorted(causes), float(losses.sum()), ranks)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor that waits for the backward pass is a weight, or a view of one. Gathered shards are weights too."""
    return isinstance(tensor, nn.Parameter | DTensor) or isinstance(tensor._base, nn.Parameter | DTensor)


def summed(reports: list[dict[str, Tensor]]) -> dict[str, float]:
    """Reports of micro-batches added up by name."""
    names = list(reports[0]) if reports else []
    if not names:
        return {}
    rows = torch.stack([torch.stack([report[name].float() for name in names]) for report in reports])
    return dict(zip(names, rows.double().sum(0).tolist(), strict=True))


def set_schedule(schedule: Any, step: int) -> None:
    schedule.last_epoch = step
    schedule._step_count = step + 1
    for group, factor, base in zip(schedule.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs, strict=True):
        group["lr"] = base * factor(step)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


@contextlib.contextmanager
def _quiet_about_order() -> Iterator[None]:
    """A step that was skipped (or a trainer step without an update, as in critic warm-up) makes torch warn about the order."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
