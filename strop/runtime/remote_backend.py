"""A model in training on its own machines: a training worker on every device there, and a backend for ranks.

The workers relate to each other like the ranks of a run: several of them shard the model by FSDP, every call
goes to all of them, and the result of the first one counts. A worker holds state that exists nowhere else, so
its death ends the attempt, and the run goes on from its checkpoint. This file knows nothing of Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from strop.backends.base import Backend, Loss, MicroBatching, Outputs, StepInfo
from strop.backends.fsdp.sharded import whole
from strop.backends.micro_batches import NonFiniteLoss
from strop.ranks import Ranks
from strop.run.checkpoint.shards import SavedTensor
from strop.run.checkpoint.tensor_files import join, split
from strop.runtime.launch import enter_folder, free_port, network_environment
from strop.runtime.remote_models import BatchArrays, output_arrays
from strop.types import Batch

BUCKET_BYTES = 256 * 2**20
"""Bytes of weights in one call."""

T = TypeVar("T")
BackendFactory = Callable[[int], AbstractContextManager[Backend]]
"""From the number of steps of the run to the backend, for as long as the block lasts."""
PackedTensor = tuple[np.ndarray, torch.dtype, tuple[int, ...]]
"""A tensor as bytes, dtype and shape. Arrays travel many times faster, but do not know every dtype."""
TensorSizes = dict[str, int]
"""Bytes of each tensor, by name."""


class TrainingWorkers(Protocol):
    """The training workers of one model."""

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of every `TrainingWorker` and return the result of the first one."""
        ...


class RankWorker:
    """One rank of a model on machines of its own, before it has built anything."""

    def machine(self) -> tuple[str, int]:
        """Return host name and process id."""
        return socket.gethostname(), os.getpid()

    def free_port(self) -> int:
        """Return a free port of this machine, for MASTER_PORT."""
        return free_port()

    def set_environment(self, folder: str, address: str, environment: Mapping[str, str]) -> None:
        """Change to `folder`, where relative paths begin, and set the variables of a rank."""
        enter_folder(folder)
        os.environ.update({**network_environment(address), **environment})


class TrainingWorker(RankWorker):
    """One device, in the process that trains on it."""

    backend: Backend

    def __init__(self, make: BackendFactory) -> None:
        self._make = make
        self._stack = ExitStack()
        self._tensors: dict[str, Tensor] = {}
        """Tensors that wait for `fetch`."""

    # --- start ----------------------------------------------------------------------------------------------

    def make(self, total_steps: int) -> None:
        """Build the backend."""
        self.backend = self._stack.enter_context(self._make(total_steps))

    def run_method(self, method: str, arguments: Sequence[object]) -> object:
        """Run a method on every worker. Only the first worker returns its result."""
        result = getattr(self, method)(*arguments)
        if method == "make" or self.backend.ranks.is_rank0:
            return result
        return None

    # --- the methods of a backend ---------------------------------------------------------------------------

    def forward(
        self, arrays: BatchArrays, want: Sequence[str], micro: MicroBatching
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return the outputs, and the count of out-of-memory retries."""
        outputs = self.backend.forward(arrays.batch(), want, micro)
        return output_arrays(outputs), self.backend.out_of_memory

    def forward_backward(
        self, arrays: BatchArrays, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> tuple[dict[str, float], int]:
        """Return the reported sums, and the count of out-of-memory retries."""
        reported = self.backend.forward_backward(arrays.batch(), want, loss, micro)
        return reported, self.backend.out_of_memory

    def step(self) -> StepInfo:
        return self.backend.step()

    def advance_schedule(self) -> None:
        self.backend.advance_schedule()

    def offload(self) -> None:
        self.backend.offload()

    def onload(self) -> None:
        self.backend.onload()

    # --- weights --------------------------------------------------------------------------------------------

    def state(self) -> tuple[object, TensorSizes]:
        """Return the state dict without its tensors, and the bytes of each tensor; `fetch` returns them."""
        return self._set_aside(self.backend.state_dict())

    def weights(self) -> tuple[object, TensorSizes]:
        """Return the same for the weights to export."""
        exported = {}
        for name, weight in self.backend.export_weights():
            if self.backend.ranks.is_rank0:
                exported[name] = weight.cpu()
        return self._set_aside(exported)

    def _set_aside(self, tree: object) -> tuple[object, TensorSizes]:
        plain, self._tensors = split(tree)
        sizes: dict[str, int] = {}
        for name, tensor in self._tensors.items():
            sizes[name] = tensor.numel() * tensor.element_size()
        return plain, sizes

    def fetch(self, names: Sequence[str]) -> dict[str, PackedTensor]:
        """Return unsharded tensors. Each is returned once."""
        found = {}
        for name in names:
            if name in self._tensors:
                found[name] = self._tensors.pop(name)
        return {name: pack_tensor(whole(tensor)) for name, tensor in found.items()}

    def load(self, state: Mapping[str, object]) -> None:
        """Load a state dict. Its tensors are still in their files, and every worker reads what it needs."""
        if self.backend.ranks.world == 1:
            state = {key: read_saved_tensors(value) for key, value in state.items()}
        self.backend.load_state_dict(state)


class RemoteBackend:
    """The backend of a model on other machines.

    All ranks hold the same batch, so rank 0 calls the workers and broadcasts the results.
    """

    out_of_memory = 0

    def __init__(
        self,
        workers: TrainingWorkers,
        ranks: Ranks,
        module: nn.Module,
        temperature: float,
        total_steps: int,
        key: str,
    ) -> None:
        """`module` has no weights and only says what kind of model it is. `key` of the configuration gave the
        model its machines."""
        self._workers = workers
        self.ranks = ranks
        self.module = module
        self.temperature = temperature
        self._key = key
        self._call("make", total_steps)

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        found, self.out_of_memory = self._call("forward", BatchArrays.of(batch), list(want), micro)
        return Outputs(**{name: torch.tensor(table) for name, table in found.items()})

    def forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        arrays = BatchArrays.with_all_fields(batch)
        reported, self.out_of_memory = self._call("forward_backward", arrays, list(want), loss, micro)
        return dict(reported)

    def step(self) -> StepInfo:
        info: StepInfo = self._call("step")
        return info

    def advance_schedule(self) -> None:
        self._call("advance_schedule")

    def offload(self) -> None:
        self._call("offload")

    def onload(self) -> None:
        self._call("onload")

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights on rank 0, which writes them."""
        yield from self._fetch("weights").items()

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded state on rank 0, which writes it; other ranks have empty parts."""
        return self._fetch("state") or {"model": {}, "optimizer": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load", state)

    def _call(self, method: str, *arguments: object) -> Any:
        """Call the workers from rank 0 and return their result on every rank."""

        def call() -> Any:
            if not self.ranks.is_rank0:
                return None
            try:
                return self._workers.call(method, *arguments)
            except NonFiniteLoss as problem:  # every rank must raise it unchanged
                return problem

        result = self.ranks.broadcast_object(self._on_all_ranks(call))
        if isinstance(result, NonFiniteLoss):
            raise result
        return result

    def _fetch(self, method: str) -> dict[str, Any]:
        """Return a tree of tensors, fetched bucket by bucket, on rank 0."""

        def fetch() -> dict[str, Any]:
            if not self.ranks.is_rank0:
                return {}
            plain, sizes = self._workers.call(method)
            tensors: dict[str, Tensor] = {}
            for names in buckets(sizes, BUCKET_BYTES):
                for name, packed in self._workers.call("fetch", names).items():
                    tensors[name] = unpack_tensor(*packed)
            tree: dict[str, Any] = join(plain, tensors)
            return tree

        return self._on_all_ranks(fetch)

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        return self.ranks.run_or_raise_on_all(work, f"asking the model on machines of its own ({self._key})")


def buckets(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yield names in order, as many at a time as fit into `limit` bytes, and at least one.

    >>> list(buckets({"a": 3, "b": 4, "c": 9, "d": 1}, 7))
    [['a', 'b'], ['c'], ['d']]
    """
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > limit:
            yield names
            names = []
            filled = 0
        names.append(name)
        filled += size
    if names:
        yield names


def pack_tensor(tensor: Tensor) -> PackedTensor:
    """Return a tensor as bytes, dtype and shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def unpack_tensor(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of a PackedTensor."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = array
    return tensor


def read_saved_tensors(tree: object) -> object:
    """Return a tree with the tensors that are still in files read into memory."""
    if isinstance(tree, Mapping):
        return {key: read_saved_tensors(value) for key, value in tree.items()}
    if isinstance(tree, SavedTensor):
        return tree.read()
    return tree
