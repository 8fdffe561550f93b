"""Weights on their way to another process of this machine: a bucket at a time through a file in shared memory.

A bucket travels as its table of contents, a short JSON text: which file, and which weight lies where in it. So every way of
calling the other process will do, even one that only takes texts.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64


@dataclass(frozen=True)
class Bucket:
    memory: Tensor
    """What was filled of it, as bytes."""
    table: list[dict[str, Any]]
    """Name, dtype, shape and place of each weight."""
    first: bool
    last: bool

    def contents(self, **more: Any) -> str:
        return json.dumps({"first": self.first, "last": self.last, "weights": self.table, **more})


@torch.no_grad()
def pack(weights: Iterable[tuple[str, Tensor]], room: Callable[[int], Tensor]) -> Iterator[Bucket]:
    """Fill buckets, each in memory of at least as many bytes as `room` is asked for; an empty one if there are no weights."""
    memory, table = torch.empty(0, dtype=torch.uint8), list[dict[str, Any]]()
    used, end, first = 0, 0, True
    for name, weight in weights:
        flat = weight.detach().contiguous().flatten().view(torch.uint8)
        if table and used + flat.numel() > len(memory):
            yield Bucket(memory[:end], table, first, last=False)
            table, used, first = [], 0, False
        if not table:
            memory = room(flat.numel())
        end = used + flat.numel()
        memory[used:end].copy_(flat)
        dtype = str(weight.dtype).removeprefix("torch.")
        table.append({"name": name, "dtype": dtype, "shape": list(weight.shape), "at": used})
        used += -(-flat.numel() // _ALIGNMENT) * _ALIGNMENT
    yield Bucket(memory[:end], table, first, last=True)


class Buckets:
    def __init__(self, megabytes: int) -> None:
        """A weight larger than `megabytes` gets a bucket of its own size."""
        self._size = megabytes << 20
        self._path: Path | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def send(self, weights: Iterable[tuple[str, Tensor]], deliver: Callable[[str, bool], None]) -> None:
        """Call `deliver(contents, last)` for each bucket; it returns when the other side has read it."""
        for bucket in pack(weights, self._room):
            deliver(bucket.contents(path=str(self._path), size=len(self._memory)), bucket.last)

    def _room(self, needed: int) -> Tensor:
        """Memory for a whole bucket. A file in shared memory takes room only where it was written."""
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
    """Shared memory, or the disk where it is too small: writing past its end would kill the process."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size:
        return str(_SHARED_MEMORY)
    return tempfile.gettempdir()


def read_bucket(contents: str, memory: Tensor | None = None) -> tuple[list[tuple[str, Tensor]], bool, bool]:
    """The weights of a bucket (views of memory that the next bucket overwrites), and whether it is the first and the last.

    `memory`: the bytes of the bucket, where they came another way than by a file of this machine.
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
