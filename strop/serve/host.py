"""What the service needs of the model: adapters that are trained, and samplers that are sampled from.

`policy_host.py` is the implementation over `strop.policy.Policy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from strop.serve.losses import ServedLoss
from strop.serve.messages import LossDatum, SampledSequence
from strop.serve.requests import AdamStep, SampleRequest


@dataclass(frozen=True)
class PassResult:
    """The result of a forward (and backward) pass."""

    loss: float
    """Summed over data and tokens."""
    log_probs: Sequence[np.ndarray]
    """Of the target tokens of each datum, float32 [T]. NaN where a target is not the next token and nothing
    in the loss depends on it."""


@dataclass(frozen=True)
class HostFacts:
    """Facts of the model that is served."""

    vocabulary: int
    context: int
    """Maximum tokens of a sequence."""
    architecture: str


class AdapterHost(Protocol):
    """One model with adapters. All methods but `sample` are called by one thread at a time, while nothing is
    sampled. `sample` is called on an event loop by any number of coroutines, while nothing is trained.

    An adapter's numbers never depend on which other adapters exist. Errors of a request's contents are
    ValueError or RequestRefused and leave the adapter as it was.
    """

    @property
    def facts(self) -> HostFacts: ...

    def add(self, adapter: str, *, rank: int, seed: int) -> None: ...

    def remove(self, adapter: str) -> None: ...

    def training_pass(
        self,
        adapter: str,
        data: Sequence[LossDatum],
        loss: ServedLoss,
        settings: Mapping[str, float],
        *,
        backward: bool,
    ) -> PassResult: ...

    def step(self, adapter: str, settings: AdamStep) -> dict[str, float]: ...

    def save(self, adapter: str, folder: Path) -> None:
        """Write weights and optimizer state into a new folder."""
        ...

    def load(self, adapter: str, folder: Path, *, optimizer: bool) -> None:
        """Load what `save` wrote; without `optimizer`, the adapter starts with a fresh one."""
        ...

    def save_sampler(self, adapter: str, folder: Path) -> None:
        """Write a new folder from which `publish` samples."""
        ...

    def publish(self, sampler: str, folder: Path) -> None:
        """Make the weights of a folder ready to sample from under a name."""
        ...

    def withdraw(self, sampler: str) -> None:
        """Free what `publish` loaded."""
        ...

    async def sample(self, sampler: str | None, request: SampleRequest, seed: int) -> list[SampledSequence]:
        """None: the base model."""
        ...

    def score(self, sampler: str | None, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The log-prob of each token of each prompt after the first, float32 [length - 1]."""
        ...

    def close(self) -> None: ...
