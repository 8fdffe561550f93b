"""Training on one device: the specification of every other backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.backends.base import BackendSettings, Loss, MicroBatching, Outputs
from strop.backends.micro_batches import partition, sum_reports
from strop.backends.module_backend import ModuleBackend, refuse_other_weights
from strop.backends.offload import Offloading
from strop.backends.optimizer import MasterWeights, load_optimizer_state
from strop.models.heads import HEAD, head_is_plain
from strop.models.lora import has_adapters, merged_weights
from strop.models.patches import patch_for_device
from strop.ranks import Ranks
from strop.types import Batch, pad_columns


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
        module.to(self.device)
        heads = frozenset(name for name, _ in module.named_parameters() if HEAD in name.split(".")[:-1])
        self.weights = MasterWeights(module, compute=settings.compute, master=settings.master, keep=heads)
        patch_for_device(module)
        self._make_optimizer()
        if not heads:
            head_is_plain(module)  # checked now, so that no pass does
        self.offloading: Offloading | None = None
        if offload_model or (offload_optimizer and settings.optim is not None):
            self.offloading = Offloading(
                self, model=offload_model, optimizer=offload_optimizer and settings.optim is not None
            )
            self.offloading.offload()

    # --- passes ---------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        if self.offloading is None:
            return super().forward(batch, want, micro)
        with self.offloading.forward_pass():
            return super().forward(batch, want, micro)

    def forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        if self.offloading is not None:
            self.offloading.begin_update()
        return super().forward_backward(batch, want, loss, micro)

    def advance_schedule(self) -> None:
        super().advance_schedule()
        if self.offloading is not None:
            self.offloading.offload()

    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        self.module.eval()
        width = batch.mask.shape[1]
        tables: dict[str, Tensor] = {}
        with torch.no_grad():
            for rows in partition(batch, micro):
                for name, found in self._outputs(batch.select(rows), want).items():
                    if found.dim() == 2:
                        table = tables.setdefault(name, torch.zeros(len(batch), width))
                        table[rows] = pad_columns(found, width).float().cpu()
                    else:
                        table = tables.setdefault(name, torch.zeros(len(batch)))
                        table[rows] = found.float().cpu()
        return Outputs(**tables)

    def _forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        self.module.train()
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
            self.weights.clear_gradients()
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
