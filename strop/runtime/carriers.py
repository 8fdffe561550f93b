"""How the bytes of a bucket get from the first member of a group to all others.

By gloo they go from member to member, in chunks: each sends on what it has while the next chunk comes, so everybody, the first
one too, sends them once, however many there are. Replicas of one machine are neighbours, so the network carries a bucket once
per machine. Only neighbours are connected. NCCL does the same in its own way.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from strop.runtime.ray_agent import interface_of, network

CHUNK = 8 << 20
"""Bytes that travel at once: long enough to be worth a message, short enough that the last member begins soon."""
LOOK = 0.001
"""Seconds between two looks at what is under way."""
MOST_TAGS = 1 << 24


class Carrier(Protocol):
    def carry(self, memory: Tensor, limit: float) -> None:
        """Send `memory` to all others, as the first member, or fill it. Raises RuntimeError when a connection ends, or when
        nothing has moved for `limit` seconds."""
        ...

    def close(self) -> None:
        """End all connections."""
        ...


class Chain:
    """gloo, between neighbours."""

    def __init__(self, store: dist.Store, rank: int, world: int, address: str, limit: float) -> None:
        """`limit`: seconds in which a neighbour must have come."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        name = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
        ways = [{"interface": one} for one in name.split(",")] if name else [{"hostname": address}]
        options._devices = [gloo.create_device(**way, lazy_init=True) for way in ways]
        options._timeout = timedelta(seconds=limit)
        self._group = gloo(store, rank, world, options)
        self._before, self._after = rank - 1, (rank + 1) % world
        self._tag = 0

    def carry(self, memory: Tensor, limit: float) -> None:
        patience = timedelta(seconds=limit)
        chunks = memory.split(CHUNK) if memory.numel() else ()
        coming: list[Any] = []
        going: list[Any] = []
        tags = [(self._tag + number) % MOST_TAGS for number in range(len(chunks))]
        self._tag += len(chunks)
        try:
            if self._before >= 0:
                coming += [self._group.recv([chunk], self._before, tag) for chunk, tag in zip(chunks, tags, strict=True)]
            for number, (chunk, tag) in enumerate(zip(chunks, tags, strict=True)):
                if coming:
                    coming[number].wait(patience)
                if self._after:
                    going.append(self._group.send([chunk], self._after, tag))
            while going:
                going[0].wait(patience)
                going.pop(0)
        finally:  # what an error refers to would keep connections open
            coming.clear()
            going.clear()

    def close(self) -> None:
        self._group = None


class Nccl:
    """A broadcast between CUDA devices."""

    def __init__(self, store: dist.Store, rank: int, world: int, address: str, device: torch.device, limit: float) -> None:
        """`limit`: the longest of all that will be given."""
        os.environ.update(network(address))
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limit)
        key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(key)
        os.environ[key] = "0"  # else torch would end this process when another one dies
        try:
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world, options)
        finally:
            os.environ.pop(key) if before is None else os.environ.__setitem__(key, before)
        self._device = device

    def carry(self, memory: Tensor, limit: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        deadline = time.monotonic() + limit
        with torch.cuda.device(self._device):
            work = self._group.broadcast([memory], options)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"NCCL has not sent a bucket of weights after {limit:g} s.")
                time.sleep(LOOK)
            work.wait()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None
