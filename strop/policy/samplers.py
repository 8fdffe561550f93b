"""Which adapter of the engine samples for which adapter of the policy.

The first adapter is part of the module that the engine samples from. Others are copied into the engine when
they are first sampled from after a change, so requests of all adapters share one batch, and an adapter gets
the same samples whether or not others exist. A snapshot keeps the weights of the moment it was published.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from strop.models.lora import FIRST_ADAPTER
from strop.registry import did_you_mean
from strop.rollout.base import AdapterEngine, Engine
from strop.shared.adapter_folders import read_sampling_folder

BASE = "base"
_OWN = "adapter "
_SNAPSHOT = "snapshot "
Weights = Callable[[str], tuple[Mapping[str, Tensor], float]]
"""The weights of an adapter and its scale."""


class Samplers:
    """The adapters in an engine."""

    def __init__(self, engine: Engine, weights: Weights, *, refusal: str | None) -> None:
        """`refusal`: why this engine samples with the first adapter only; None: it does not."""
        self._engine = cast(AdapterEngine, engine)
        self._weights = weights
        self._refusal = refusal
        self._lock = threading.Lock()
        self._changes: Counter[str] = Counter()
        """How often the weights of each adapter changed."""
        self._loaded: dict[str, int] = {}
        """By their names in the engine: the changes that adapters had when they were copied into it."""
        self.snapshots: dict[str, int] = {}
        """Published names, with the updates that the adapter had then."""

    def changed(self, adapter: str) -> None:
        """The weights of an adapter have changed."""
        self._changes[adapter] += 1

    def check_adapter(self, name: str) -> None:
        """Refuse a new adapter with the name of a snapshot, from which it could not be sampled apart."""
        if name in self.snapshots:
            raise ValueError(
                f"There is a published copy {name!r} already. Unpublish it first, or choose another name."
            )

    def removed(self, adapter: str) -> None:
        """An adapter does not exist any more."""
        if self._loaded.pop(_OWN + adapter, None) is not None:
            self._engine.unload_adapter(_OWN + adapter)

    def name_of(self, adapter: str | None, adapters: list[str]) -> str | None:
        """What a request of the engine names, for an adapter, a snapshot, or None, the model without any
        adapter."""
        if adapter == FIRST_ADAPTER:
            return None
        with self._lock:
            if adapter is None:
                return self._base()
            if adapter in self.snapshots:
                return _SNAPSHOT + adapter
            if adapter not in adapters:
                known = [*adapters, *self.snapshots]
                raise ValueError(
                    f"There is no adapter {adapter!r}.{did_you_mean(adapter, known)} There are: "
                    f"{', '.join(known)}."
                )
            self._refuse()
            name = _OWN + adapter
            if self._loaded.get(name) != self._changes[adapter]:
                self._engine.load_adapter(name, *self._weights(adapter))
                self._loaded[name] = self._changes[adapter]
            return name

    def publish(self, name: str, adapter: str, adapters: list[str], updates: int) -> None:
        """Keep the weights that an adapter has now under a name of their own."""
        self._check_name(name, adapters)
        self._engine.load_adapter(_SNAPSHOT + name, *self._weights(adapter))
        self.snapshots[name] = updates

    def publish_folder(self, name: str, folder: Path, adapters: list[str]) -> None:
        """The same of an adapter in a folder of peft."""
        self._check_name(name, adapters)
        rank, alpha, weights = read_sampling_folder(folder)
        self._engine.load_adapter(_SNAPSHOT + name, weights, alpha / rank)
        self.snapshots[name] = 0

    def unpublish(self, name: str) -> None:
        """Forget a snapshot."""
        if name not in self.snapshots:
            raise ValueError(f"No snapshot {name!r} was published.{did_you_mean(name, self.snapshots)}")
        del self.snapshots[name]
        self._engine.unload_adapter(_SNAPSHOT + name)

    def _base(self) -> str:
        """The model without adapter: rows with an adapter leave out that of the module, and this one is 0."""
        self._refuse()
        if BASE not in self._loaded:
            weights, _ = self._weights(FIRST_ADAPTER)
            first = next(iter(weights)).partition(".lora_")[0]
            zeros = {}
            for name, weight in weights.items():
                if name.startswith(f"{first}.lora_"):
                    zeros[name] = torch.zeros_like(weight)
            self._engine.load_adapter(BASE, zeros, 1.0)
            self._loaded[BASE] = 0
        return BASE

    def _check_name(self, name: str, adapters: list[str]) -> None:
        self._refuse()
        if name in adapters:
            raise ValueError(f"publish({name!r}): an adapter has this name already. Choose another.")

    def _refuse(self) -> None:
        if self._refusal is not None:
            raise ValueError(self._refusal)
