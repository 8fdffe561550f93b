"""Several LoRA adapters in one backend: each has its own weights, gradients, optimizer state and schedule.

One adapter is active, and all passes and updates use it. Switching adapters copies nothing, so an adapter
gets the same results whether or not others are trained in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.backends.optimizer import MasterWeights, make_optimizer, make_schedule
from strop.backends.single import ModuleBackend, SingleBackend
from strop.backends.updates import LossScale
from strop.models.lora import (
    FIRST_ADAPTER,
    activate_adapter,
    adapted_layers,
    add_adapter,
    compute_with_adapter,
    has_adapters,
    merge_into_base,
    remove_adapter,
)
from strop.registry import did_you_mean

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass
class TrainedParameters:
    """What a backend trains, with the state of its training."""

    weights: MasterWeights
    optimizer: Optimizer | None
    schedule: LambdaLR | None
    scaling: LossScale | None


class AdapterSet:
    """The adapters of one backend, by name. A model without LoRA has one entry, for all of its weights."""

    def __init__(self, backend: ModuleBackend) -> None:
        self._backend = backend
        self.active = FIRST_ADAPTER
        self._trained = {FIRST_ADAPTER: self._current()}
        self._layers = adapted_layers(backend.module)

    @property
    def names(self) -> list[str]:
        return list(self._trained)

    def masters_of(self, name: str) -> dict[str, Tensor]:
        """The trained weights of an adapter in master precision."""
        self.check(name)
        weights = self._trained[name].weights
        if name == self.active:
            weights = self._backend.weights
        return {key: master.detach() for key, master in weights.masters.items()}

    def release(self) -> None:
        """The module belongs to its owner again: with the first adapter merged into its weights, and with
        gradients of its own."""
        for trained in self._trained.values():
            trained.weights.release()
        if has_adapters(self._backend.module):
            merge_into_base(self._backend.module, FIRST_ADAPTER)

    def check(self, name: str) -> None:
        """Refuse the name of an adapter that does not exist."""
        if name not in self._trained:
            raise ValueError(
                f"There is no adapter {name!r}.{did_you_mean(name, self._trained)} There are: "
                f"{', '.join(self._trained)}. Add it by add_adapter({name!r})."
            )

    def add(self, name: str, *, rank: int, alpha: float, seed: int) -> None:
        """Add an adapter with a new optimizer. The active adapter stays active."""
        backend = self._backend
        self._refuse_new(name)
        active = self.active
        self._trained[active] = self._current()
        settings = backend.settings
        assert settings.optim is not None
        add_adapter(backend.module, name, rank=rank, alpha=alpha, seed=seed)
        activate_adapter(backend.module, name)
        backend.module.to(backend.device)
        weights = MasterWeights(backend.module, compute=settings.compute, master=settings.master)
        optimizer = make_optimizer(weights.masters, settings.optim)
        schedule = make_schedule(optimizer, settings.optim, settings.compat)
        scaling = None if backend.scaling is None else LossScale()
        self._trained[name] = TrainedParameters(weights, optimizer, schedule, scaling)
        activate_adapter(backend.module, active)
        backend.module.train(backend.module.training)  # the new modules too

    def remove(self, name: str) -> None:
        """Delete an adapter and its optimizer state."""
        self.check(name)
        if name == FIRST_ADAPTER:
            raise ValueError(f"The adapter {name!r} cannot be removed: new adapters are made after it.")
        if name == self.active:
            self.activate(FIRST_ADAPTER)
        del self._trained[name]
        remove_adapter(self._backend.module, name)

    def activate(self, name: str) -> bool:
        """Train and sample with this adapter from now on. Returns whether another one was active."""
        self.check(name)
        if name == self.active:
            return False
        backend = self._backend
        if backend.offloading is not None:
            backend.offloading.offload()  # the other adapter is onloaded by its own passes
        self._trained[self.active] = self._current()
        trained = self._trained[name]
        for parameter in backend.weights.parameters.values():
            parameter.requires_grad_(False)
        for parameter in trained.weights.parameters.values():
            parameter.requires_grad_(True)
        compute_with_adapter(backend.module, self._layers, name)
        backend.weights = trained.weights
        backend.optimizer = trained.optimizer
        backend.schedule = trained.schedule
        backend.scaling = trained.scaling
        self.active = name
        return True

    def _refuse_new(self, name: str) -> None:
        if not has_adapters(self._backend.module):
            raise ValueError(
                f"add_adapter({name!r}): this model trains all of its weights. Give lora_rank > 0 to "
                "train adapters."
            )
        if not isinstance(self._backend, SingleBackend):
            raise ValueError(
                f"add_adapter({name!r}): the model is sharded over {self._backend.ranks.world} ranks, where "
                "an adapter cannot be added later. Use ranks=1 for several adapters."
            )
        if name in self._trained:
            raise ValueError(
                f"There is an adapter {name!r} already. Remove it first, or choose another name."
            )
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name an adapter. Use 1 to 128 letters, digits, _ and -.")

    def _current(self) -> TrainedParameters:
        backend = self._backend
        return TrainedParameters(backend.weights, backend.optimizer, backend.schedule, backend.scaling)
