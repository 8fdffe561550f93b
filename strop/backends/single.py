"""Backends whose module is in this process: what they share (`ModuleBackend`), and training on one device.

`ModuleBackend` has passes with OOM retry, updates, state and progress. Subclasses say how rows are shared
(`_forward`, `_forward_backward`) and how weights are stored: `SingleBackend` here, the specification of every
other backend, and `fsdp/backend.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.backends.activation_offload import saved_activations
from strop.backends.base import BackendSettings, Loss, MicroBatching, Outputs, StepInfo, refuse_other_weights
from strop.backends.micro_batches import NonFiniteLoss, OomRetry, on_device, partition, sum_reports, suspects
from strop.backends.offload import Offloading
from strop.backends.optimizer import (
    MasterWeights,
    advance,
    load_optimizer_state,
    make_optimizer,
    make_schedule,
    move_optimizer,
    optimizer_state,
    set_schedule,
)
from strop.backends.output_tables import empty_tables, write_rows
from strop.backends.updates import LossScale, StepSettings, overridden
from strop.models.build import persistent_buffers
from strop.models.forward import head_is_plain, response_outputs
from strop.models.heads import HEAD
from strop.models.layouts.check import runs_packed
from strop.models.layouts.routing import end_routing, routings
from strop.models.lora import adapters_off, has_adapters, merged_weights
from strop.models.patches import patch_for_device
from strop.models.sequence_parallel import Slicing
from strop.ranks import Ranks
from strop.types import Batch


class ModuleBackend(ABC):
    """A module with its master weights, optimizer and schedule. Without `settings.optim` it is frozen."""

    weights: MasterWeights
    optimizer: Optimizer | None = None
    schedule: LambdaLR | None = None
    slicing: Slicing | None = None
    """Set where several ranks share each packed row."""
    offloading: Offloading | None = None
    """Set where something waits in host memory between passes."""

    def __init__(self, module: Any, settings: BackendSettings, ranks: Ranks) -> None:
        if settings.optim is not None and settings.master == torch.float16:
            raise ValueError(
                "Updates vanish in fp16 masters. Set fsdp_config.model_dtype=fp32; fsdp_config.dtype may be "
                "float16."
            )
        self.module = module
        self.settings = settings
        self.ranks = ranks
        self.device = torch.device(settings.device)
        self.temperature = settings.temperature
        self.oom_retry = OomRetry(ranks, settings.on_out_of_memory)
        self.scaling: LossScale | None = None
        if settings.compute == torch.float16:
            self.scaling = LossScale()
        if settings.optim is None:
            module.requires_grad_(False)

    def _make_optimizer(self) -> None:
        """Optimizer and schedule over the master weights, unless the model is frozen."""
        optim = self.settings.optim
        if optim is not None:
            self.optimizer = make_optimizer(self.weights.masters, optim)
            self.schedule = make_schedule(self.optimizer, optim, self.settings.compat)

    # --- passes ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        """One try of `forward`, with micro-batches of this size."""

    @abstractmethod
    def _forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        """One try of `forward_backward`, with micro-batches of this size."""

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        """Outputs named in `want`, without gradients, on the CPU in fp32."""
        if self.settings.router_replay != "R3":
            batch = batch.replace(experts=None)  # routers choose: only an update replays
        with self._model_on_device():
            return self.oom_retry.run(
                micro, batch.lengths, lambda smaller: self._forward(batch, want, smaller)
            )

    def forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        """Accumulate gradients of `loss` over all micro-batches; returns the reported sums."""
        assert self.optimizer is not None, "a frozen model has no gradients"
        if self.settings.router_replay == "disabled":
            batch = batch.replace(experts=None)
        if self.offloading is not None:
            self.offloading.begin_update()
        # With gradients of an earlier call, a second try would lose them.
        fresh = not self.weights.gradients

        def attempt(smaller: MicroBatching) -> dict[str, float]:
            while True:
                if fresh:
                    self.weights.clear_gradients()
                found = self._forward_backward(batch, want, loss, smaller)
                if self.scaling is None or not fresh or math.isfinite(self.weights.gradient_norm()):
                    return found
                if not self.scaling.shrink():
                    return found  # `step` will leave the weights alone

        try:
            return self.oom_retry.run(micro, batch.lengths, attempt, again=fresh)
        except BaseException:  # after some micro-batches: an update would be that of a part of the batch
            self.weights.clear_gradients()
            raise
        finally:
            if self.module in routings:
                end_routing(self.module)

    @property
    def out_of_memory(self) -> int:
        return self.oom_retry.count

    @cached_property
    def _packed(self) -> bool:
        """Whether sequences are packed, where the model can."""
        return runs_packed(self.module, self.settings.packed, self.slicing is not None)

    def _outputs(self, piece: Batch, want: Sequence[str]) -> dict[str, Tensor]:
        """The model's outputs for one micro-batch."""
        return response_outputs(
            self.module,
            piece,
            want,
            temperature=self.temperature,
            packed=self._packed,
            attention=self.settings.attention,
            slicing=self.slicing,
            topk=self.settings.topk,
        )

    def _saved_activations(self) -> AbstractContextManager[object]:
        return saved_activations(self.device) if self.settings.offload_activations else nullcontext()

    def _learn(self, piece: Batch, want: Sequence[str], loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward of one micro-batch: its loss and what it reports."""
        with self._saved_activations():
            outputs = Outputs(**self._outputs(piece, want))
            value, sums = loss(outputs, on_device(piece, self.device))
        (value if self.scaling is None else value * self.scaling.value).backward()
        return value.detach(), {name: number.detach() for name, number in sums.items()}

    def _refuse_loss(
        self,
        batch: Batch,
        want: Sequence[str],
        parts: list[list[int]],
        losses: Tensor,
        ranks: Sequence[int] = (),
    ) -> None:
        """Raise for losses that are not finite. Weights have not moved: another pass shows the rows that the
        model fails on."""
        rows: list[int] = []
        causes: set[str] = set()
        without_loss = [name for name in want if name != "auxiliary"]
        for part, value in zip(parts, losses, strict=True):
            if value.isfinite():
                continue
            piece = batch.select(part)
            outputs = self.forward(piece, without_loss, MicroBatching(rows=len(part)))
            tables = {name: table for name, table in vars(outputs).items() if table is not None}
            places, names = suspects(piece, tables)
            rows += [part[place] for place in places] or part
            causes |= set(names)
        ids: Sequence[int] = range(len(batch))
        if batch.row_ids is not None:
            ids = batch.row_ids.tolist()
        raise NonFiniteLoss(sorted(ids[row] for row in rows), sorted(causes), float(losses.sum()), ranks)

    # --- updates --------------------------------------------------------------------------------------------

    def step(self, settings: StepSettings | None = None) -> StepInfo:
        """Clip, update, clear gradients. `settings`: other hyperparameters for this update."""
        assert self.optimizer is not None, "a frozen model takes no steps"
        if self.offloading is not None:
            self.offloading.begin_update()  # passes of another adapter may have come in between
        grad_clip = self.settings.grad_clip
        if settings is None:
            return self._step(self.optimizer, grad_clip)
        if settings.grad_clip is not None:
            grad_clip = settings.grad_clip or None
        with overridden(self.optimizer, settings):
            return self._step(self.optimizer, grad_clip)

    def _step(self, optimizer: Optimizer, grad_clip: float | None) -> StepInfo:
        lr = self.learning_rate
        scale = None
        if self.scaling is not None:
            scale = self.scaling.value
            self.weights.multiply_gradients(1 / scale)
        norm = self.weights.gradient_norm()
        usable = math.isfinite(norm)
        if usable:
            self.weights.clip(norm, grad_clip)
            optimizer.step()
            self.weights.publish()
        if self.scaling is not None:
            self.scaling.stepped() if usable else self.scaling.shrink()
        self.weights.clear_gradients()
        return StepInfo(grad_norm=norm, lr=lr, skipped=not usable, loss_scale=scale)

    @property
    def learning_rate(self) -> float:
        if self.optimizer is None:
            return 0.0
        return float(self.optimizer.param_groups[0]["lr"])

    def advance_schedule(self) -> None:
        """Once per trainer step: the learning rate of the next one."""
        assert self.schedule is not None, "a frozen model has no schedule"
        advance(self.schedule)
        if self.offloading is not None:
            self.offloading.offload()

    def reference(self) -> AbstractContextManager[None]:
        """Inside it LoRA adapters are off: the model before training."""
        return adapters_off(self.module)

    # --- state ----------------------------------------------------------------------------------------------

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, in compute precision, LoRA merged."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`; optimizer and schedule may be left out."""

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, by parameter name: copy them before the next step. With adapters, only what is
        trained."""
        model = {name: master.detach() for name, master in self.weights.masters.items()}
        if not has_adapters(self.module):
            model |= self._untrained_state(model)
        state: dict[str, Any] = {"model": model}
        if self.optimizer is not None and self.schedule is not None:
            state["optimizer"] = optimizer_state(self.optimizer, self.weights.masters)
            state["schedule"] = {"step": self.schedule.last_epoch}
            if self.scaling is not None:
                state["loss_scale"] = self.scaling.state()
        return state

    def _untrained_state(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Frozen parameters, then persistent buffers."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if name not in trained:
                found[name] = parameter.detach()
        return found | persistent_buffers(self.module)

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Move the model, the optimizer (with master weights), or both to host memory."""
        self._move(torch.device("cpu"), model, optimizer)

    def onload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Move them back to the device."""
        self._move(self.device, model, optimizer)

    def _offload_between_passes(self, *, model: bool, optimizer: bool) -> None:
        """From now on they wait in host memory: the model between passes, the optimizer between updates."""
        optimizer = optimizer and self.optimizer is not None
        if model or optimizer:
            self.offloading = Offloading(self, model=model, optimizer=optimizer)
            self.offloading.offload()

    def _model_on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self.offloading is None else self.offloading.forward_pass()

    def _move(self, device: torch.device, model: bool, optimizer: bool) -> None:
        if model:
            self.module.to(device)
        if optimizer:
            self.weights.to(device)
            if self.optimizer is not None:
                move_optimizer(self.optimizer, device)

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        if self.schedule is not None and "schedule" in state:
            set_schedule(self.schedule, state["schedule"]["step"])
        if self.scaling is not None and "loss_scale" in state:
            self.scaling.load(state["loss_scale"])


class SingleBackend(ModuleBackend):
    """One model on one device. Its module computes in `settings.compute`; master weights and optimizer state
    are kept in `settings.master`.

    Give the module in its best precision: master weights are made of it before it is rounded.
    """

    needs_ranks = False

    def __init__(
        self,
        module: Any,
        settings: BackendSettings | None = None,
        *,
        offload_model: bool = False,
        offload_optimizer: bool = False,
    ):
        """With `offload_model` the module waits in host memory between passes; with `offload_optimizer`
        master weights and optimizer state do, from the last update of a step to the next step."""
        settings = settings or BackendSettings()
        super().__init__(module, settings, Ranks())
        self._mode: bool | None = None  # of all modules; None: not known
        module.to(self.device)
        heads = frozenset(name for name, _ in module.named_parameters() if HEAD in name.split(".")[:-1])
        self.weights = MasterWeights(module, compute=settings.compute, master=settings.master, keep=heads)
        patch_for_device(module, dtype=settings.compute)
        self._make_optimizer()
        if not heads:
            head_is_plain(module)  # checked now, so that no pass does
        self._offload_between_passes(model=offload_model, optimizer=offload_optimizer)

    # --- passes ---------------------------------------------------------------------------------------------

    def _set_mode(self, *, training: bool) -> None:
        """A model with many adapters has thousands of modules: walk through them only for another mode."""
        if (self._mode, self.module.training) != (training, training):
            self.module.train(training)
            self._mode = training

    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        self._set_mode(training=False)
        tables = empty_tables(batch, want, self.module, topk=self.settings.topk)
        with torch.no_grad():
            for rows in partition(batch, micro):
                for name, found in self._outputs(batch.select(rows), want).items():
                    write_rows(tables, name, rows, found)
        if self.module in routings:
            end_routing(self.module)
        return Outputs(**tables)

    def _forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        self._set_mode(training=True)
        parts = partition(batch, micro)
        losses = []
        reports = []
        for rows in parts:
            value, report = self._learn(batch.select(rows), want, loss)
            losses.append(value)
            reports.append(report)
        # Read once at the end: reading each loss would make the device wait for every micro-batch.
        found = torch.stack(losses).float().cpu()
        if not found.isfinite().all():
            self._refuse_loss(batch, want, parts, found)
        return sum_reports(reports)

    # --- weights --------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, in compute precision, LoRA merged."""
        if has_adapters(self.module):
            yield from merged_weights(self.module)
            return
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`model` must name exactly the weights of this one; `optimizer` and `schedule` may be left out."""
        own = self.state_dict()["model"]
        given = state["model"]
        refuse_other_weights(own, given)
        with torch.no_grad():
            for name in own.keys() - self.weights.masters.keys():
                own[name].copy_(given[name])
        self.weights.load(given)
        if self.optimizer is not None and "optimizer" in state:
            load_optimizer_state(self.optimizer, self.weights.masters, state["optimizer"])
        self._load_progress(state)
