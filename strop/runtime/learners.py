"""A model that learns on machines of its own: a learner on every device there, and a backend here that asks them.

Learners are to each other what the ranks of a run are: several of them divide the model by FSDP, all are asked the same, and
the first one's answer is everybody's. A learner holds what nobody else has, so one that dies ends the attempt, and the run goes
on from its checkpoint. This file knows nothing of Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from strop.backends.base import Backend, Loss, MicroBatching, Outputs, StepInfo
from strop.backends.nonfinite import NonFiniteLoss
from strop.backends.sharded import whole
from strop.ranks import Ranks
from strop.run.shards import SavedTensor
from strop.run.tree import join, split
from strop.runtime.frozen import Question
from strop.runtime.ray_agent import network
from strop.types import Batch

BUCKET = 256 * 2**20
"""Bytes of weights that travel at once."""

Make = Callable[[int], AbstractContextManager[Backend]]
"""From the number of steps of the run to its backend, for as long as the block lasts."""
Packed = tuple[np.ndarray, torch.dtype, tuple[int, ...]]
"""A tensor as bytes, which travel many times faster: arrays do not know every dtype."""


class Team(Protocol):
    """The learners of one model."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of every `Learner`; what the first one answers."""
        ...


class Learner:
    """One device, where it lives."""

    backend: Backend

    def __init__(self, make: Make) -> None:
        self._make = make
        self._open = ExitStack()
        self._laid_out: dict[str, Tensor] = {}

    # --- to begin with ------------------------------------------------------------------------------------------------------

    def machine(self) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def settle(self, folder: str, address: str, environment: Mapping[str, str]) -> None:
        """Where relative paths begin, how this machine is known, and who the other learners are (the variables of a rank)."""
        with suppress(OSError):  # a path that is then missing is told with its key
            os.chdir(folder)
        os.environ.update({**network(address), **environment})

    def make(self, total_steps: int) -> None:
        self.backend = self._open.enter_context(self._make(total_steps))

    # --- what a backend is asked --------------------------------------------------------------------------------------------

    def do(self, method: str, arguments: Sequence[Any]) -> Any:
        """Every learner does it; the first one's answer travels."""
        answer = getattr(self, method)(*arguments)
        return answer if method == "make" or self.backend.ranks.lead else None

    def forward(self, question: Question, want: Sequence[str], micro: MicroBatching) -> tuple[dict[str, np.ndarray], int]:
        found = vars(self.backend.forward(question.batch(), want, micro))
        return {name: table.numpy() for name, table in found.items() if table is not None}, self.backend.out_of_memory

    def forward_backward(
        self, question: Question, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> tuple[dict[str, float], int]:
        return self.backend.forward_backward(question.batch(), want, loss, micro), self.backend.out_of_memory

    def step(self) -> StepInfo:
        return self.backend.step()

    def advance_schedule(self) -> None:
        self.backend.advance_schedule()

    def offload(self) -> None:
        self.backend.offload()

    def onload(self) -> None:
        self.backend.onload()

    # --- weights ------------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Any, dict[str, int]]:
        """What it knows without its tensors, and how many bytes each of those has; `fetch` gives them."""
        return self._lay_out(self.backend.state_dict())

    def weights(self) -> tuple[Any, dict[str, int]]:
        """The same of the weights to export."""
        mine = {name: weight.cpu() for name, weight in self.backend.export_weights() if self.backend.ranks.lead}
        return self._lay_out(mine)

    def _lay_out(self, tree: Any) -> tuple[Any, dict[str, int]]:
        plain, self._laid_out = split(tree)
        return plain, {name: tensor.numel() * tensor.element_size() for name, tensor in self._laid_out.items()}

    def fetch(self, names: Sequence[str]) -> dict[str, Packed]:
        """Whole tensors. They are given once."""
        found = {name: self._laid_out.pop(name) for name in names if name in self._laid_out}
        return {name: packed(whole(tensor)) for name, tensor in found.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Tensors of the state are still in their files, of which every learner reads what it needs."""
        self.backend.load_state_dict(in_memory(state) if self.backend.ranks.world == 1 else state)


class FarBackend:
    """The backend of a model that is elsewhere. Rank 0 asks, since all ranks hold the same batch, and tells the others."""

    out_of_memory = 0

    def __init__(self, team: Team, ranks: Ranks, module: Any, temperature: float, total_steps: int, key: str) -> None:
        """`module` has no weights and says what kind of model it is. `key` of the configuration gave it its machines."""
        self._team, self.ranks, self._key = team, ranks, key
        self.module, self.temperature = module, temperature
        self._ask("make", total_steps)

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        found, self.out_of_memory = self._ask("forward", Question.of(batch), list(want), micro)
        return Outputs(**{name: torch.tensor(table) for name, table in found.items()})

    def forward_backward(self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching) -> dict[str, float]:
        reported, self.out_of_memory = self._ask("forward_backward", Question.whole(batch), list(want), loss, micro)
        return dict(reported)

    def step(self) -> StepInfo:
        info: StepInfo = self._ask("step")
        return info

    def advance_schedule(self) -> None:
        self._ask("advance_schedule")

    def offload(self) -> None:
        self._ask("offload")

    def onload(self) -> None:
        self._ask("onload")

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """To rank 0, which writes them."""
        yield from self._fetched("weights").items()

    def state_dict(self) -> dict[str, Any]:
        """Whole, and of rank 0 alone: it writes what is whole."""
        return self._fetched("state") or {"model": {}, "optimizer": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ask("load", state)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The answer of the learners, to every rank."""

        def ask() -> Any:
            try:
                return self._team.ask(method, *arguments) if self.ranks.lead else None
            except NonFiniteLoss as problem:  # every rank must see it as it is
                return problem

        found = self.ranks.from_lead(self._together(ask))
        if isinstance(found, NonFiniteLoss):
            raise found
        return found

    def _fetched(self, method: str) -> dict[str, Any]:
        """A tree of tensors, bucket by bucket."""

        def fetch() -> dict[str, Any]:
            if not self.ranks.lead:
                return {}
            plain, sizes = self._team.ask(method)
            tensors: dict[str, Tensor] = {}
            for names in buckets(sizes, BUCKET):
                tensors |= {name: unpacked(*found) for name, found in self._team.ask("fetch", names).items()}
            tree: dict[str, Any] = join(plain, tensors)
            return tree

        return self._together(fetch)

    def _together(self, work: Callable[[], Any]) -> Any:
        return self.ranks.together(work, f"asking the model on machines of its own ({self._key})")


def buckets(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, as many at a time as fit into `limit` bytes, and at least one.

    >>> list(buckets({"a": 3, "b": 4, "c": 9, "d": 1}, 7))
    [['a', 'b'], ['c'], ['d']]
    """
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > limit:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def packed(tensor: Tensor) -> Packed:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def unpacked(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = array
    return tensor


def in_memory(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: in_memory(value) for key, value in tree.items()}
    return tree.read() if isinstance(tree, SavedTensor) else tree
