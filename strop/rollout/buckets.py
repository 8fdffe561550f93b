"""Weight transfer to another process on this machine: one bucket at a time through a file in shared memory.

The other process gets a short JSON string for each bucket: the file's path, and the offset of each weight in
it. So any RPC that takes strings can deliver it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")
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
        self._path: Path | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def send(self, weights: Iterable[tuple[str, Tensor]], deliver: Callable[[str, bool], None]) -> None:
        """Call `deliver(contents, last)` for each bucket; it must return after the other side has read it."""
        for bucket in pack(weights, self._allocate):
            deliver(bucket.contents(path=str(self._path), size=len(self._memory)), bucket.last)

    def _allocate(self, needed: int) -> Tensor:
        """Memory for a whole bucket. A file in shared memory only uses the pages that were written."""
        if needed <= len(self._memory):
            return self._memory
        self.close()
        size = max(self._size, needed)
        handle, name = tempfile.mkstemp(prefix="strop-weights-", dir=_folder(size))
        os.close(handle)
        self._path = Path(name)
        self._memory = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        return self._memory

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def _folder(size: int) -> str:
    """Shared memory, or the disk if that is too small: writing past its end would kill the process."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size:
        return str(_SHARED_MEMORY)
    return tempfile.gettempdir()


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
