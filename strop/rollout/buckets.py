"""Weight transfer to another process on this machine: one bucket at a time through shared memory.

The other process gets a short JSON string for each bucket: the file's path, and the offset of each weight in
it. So any RPC that takes strings can deliver it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, TypedDict

import torch
from torch import Tensor

_ALIGNMENT = 64


class WeightEntry(TypedDict):
    """Where one weight lies in a bucket."""

    name: str
    dtype: str
    shape: list[int]
    at: int
    """Offset in bytes."""


@dataclass(frozen=True)
class Bucket:
    memory: Tensor
    """The used part, as bytes."""
    table: list[WeightEntry]
    first: bool
    last: bool

    def contents(self, **more: object) -> str:
        """The bucket's description as JSON."""
        return json.dumps({"first": self.first, "last": self.last, "weights": self.table, **more})


@torch.no_grad()
def pack(weights: Iterable[tuple[str, Tensor]], allocate: Callable[[int], Tensor]) -> Iterator[Bucket]:
    """Fill buckets. `allocate(n)` returns the memory of a bucket, at least n bytes. Without weights, one
    empty bucket."""
    memory = torch.empty(0, dtype=torch.uint8)
    table: list[WeightEntry] = []
    used = 0
    end = 0
    first = True
    for name, weight in weights:
        flat = weight.detach().contiguous().flatten().view(torch.uint8)
        if table and used + flat.numel() > len(memory):
            yield Bucket(memory[:end], table, first, last=False)
            table = []
            used = 0
            first = False
        if not table:
            memory = allocate(flat.numel())
        end = used + flat.numel()
        memory[used:end].copy_(flat)
        dtype = str(weight.dtype).removeprefix("torch.")
        table.append({"name": name, "dtype": dtype, "shape": list(weight.shape), "at": used})
        used += -(-flat.numel() // _ALIGNMENT) * _ALIGNMENT
    yield Bucket(memory[:end], table, first, last=True)


class Buckets:
    def __init__(self, megabytes: int) -> None:
        """`megabytes`: size of a bucket; a larger weight gets a bucket of the weight's size."""
        self._size = megabytes << 20
        self._file: IO[bytes] | None = None
        self._path = ""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def send(self, weights: Iterable[tuple[str, Tensor]], deliver: Callable[[str, bool], None]) -> None:
        """Call `deliver(contents, last)` for each bucket; it must return after the other side has read it."""
        for bucket in pack(weights, self._allocate):
            deliver(bucket.contents(path=self._path, size=len(self._memory)), bucket.last)

    def _allocate(self, needed: int) -> Tensor:
        """Memory for a whole bucket. Only the pages that were written use memory."""
        if needed <= len(self._memory):
            return self._memory
        self.close()
        size = max(self._size, needed)
        self._file, self._path = _shared_file()
        self._memory = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        return self._memory

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()
            self._file = None


def _shared_file() -> tuple[IO[bytes], str]:
    """An empty file that is gone when it is closed, and the path under which other processes open it."""
    if not hasattr(os, "memfd_create"):
        file = tempfile.NamedTemporaryFile(prefix="strop-weights-")  # noqa: SIM115 - the caller closes it
        return file, file.name
    # It has no name in /dev/shm: its memory is freed even if this process is killed, and the size of /dev/shm
    # (64 MB in a container) does not limit it.
    memory = os.fdopen(os.memfd_create("strop-weights"), "wb")
    return memory, f"/proc/{os.getpid()}/fd/{memory.fileno()}"


def read_bucket(contents: str, memory: Tensor | None = None) -> tuple[list[tuple[str, Tensor]], bool, bool]:
    """The weights of a bucket, whether it is the first, and whether it is the last.

    The weights are views of memory that the next bucket overwrites. `memory`: the bytes of the bucket, if
    they did not come through a file on this machine.
    """
    table = json.loads(contents)
    if not table["weights"]:
        return [], table["first"], table["last"]
    if memory is None:
        memory = torch.from_file(table["path"], shared=True, size=table["size"], dtype=torch.uint8)
    weights = []
    for entry in table["weights"]:
        dtype = getattr(torch, entry["dtype"])
        count = 1
        for side in entry["shape"]:
            count *= side
        part = memory[entry["at"] : entry["at"] + count * dtype.itemsize]
        weights.append((entry["name"], part.view(dtype).view(entry["shape"])))
    return weights, table["first"], table["last"]
