"""Broadcast of weights from one process to many, by a process group that is independent of the trainer's.

Rank 0 of the group hosts a store. The other members meet it there, and it publishes there what each bucket
holds. The bytes travel by NCCL when every member has a CUDA device, otherwise by gloo. A member that fails
leaves the group, which closes its connections, so that no other member waits for it: all others fail as well,
and the group is formed again.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from strop.runtime.launch import address_towards, interface_of_address, network_environment

CHUNK_BYTES = 8 << 20
"""Bytes of one gloo message: large enough to be efficient, small enough that the last member of the chain
begins soon."""
POLL_SECONDS = 0.001
MAX_TAG = 1 << 24
"""Message tags of gloo repeat after this many chunks."""
SETTLE = 30.0
"""Seconds in which the members must meet. All of them are running when they are called."""
CLOSE_SECONDS = 2.0
"""Seconds in which a closed connection is noticed."""
BUCKETS_IN_MEMORY = 3
"""Buckets that a receiver holds at most: one is received, one waits, and one is loaded."""


class GroupBroken(Exception):
    """A member is gone, or does not answer within the limit."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a group meet."""

    host: str
    port: int
    world: int
    limit: float
    """Seconds that a bucket may take."""


# --- moving bytes -------------------------------------------------------------------------------------------


class ByteTransport(Protocol):
    """Moves the bytes of a bucket from rank 0 to all other members."""

    def broadcast(self, memory: Tensor, limit: float) -> None:
        """Send `memory` on rank 0, or fill it on the others. RuntimeError when a connection ends, or when
        nothing has moved for `limit` seconds."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class GlooChain:
    """A chain of gloo connections: each member receives from the one before and sends to the next.

    A member sends a chunk on while the next one arrives, so every member sends the bytes once, whatever their
    number. Replicas of one machine are neighbours, so a bucket crosses the network once per machine. Only
    neighbours are connected.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, address: str, limit: float) -> None:
        """`limit`: seconds in which the neighbours must connect."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of_address(address)
        if interfaces:
            devices = [gloo.create_device(interface=name, lazy_init=True) for name in interfaces.split(",")]
        else:
            devices = [gloo.create_device(hostname=address, lazy_init=True)]
        options._devices = devices
        options._timeout = timedelta(seconds=limit)
        self._group = gloo(store, rank, world, options)
        self._previous = rank - 1
        self._next = (rank + 1) % world
        self._tag = 0

    def broadcast(self, memory: Tensor, limit: float) -> None:
        timeout = timedelta(seconds=limit)
        chunks = memory.split(CHUNK_BYTES) if memory.numel() else ()
        tags = [(self._tag + number) % MAX_TAG for number in range(len(chunks))]
        self._tag += len(chunks)
        receiving: list[dist.Work] = []
        sending: list[dist.Work] = []
        try:
            if self._previous >= 0:
                for chunk, tag in zip(chunks, tags, strict=True):
                    receiving.append(self._group.recv([chunk], self._previous, tag))
            for number, (chunk, tag) in enumerate(zip(chunks, tags, strict=True)):
                if receiving:
                    receiving[number].wait(timeout)
                if self._next:
                    sending.append(self._group.send([chunk], self._next, tag))
            while sending:
                sending[0].wait(timeout)
                sending.pop(0)
        finally:  # an error's traceback refers to these lists, which would keep connections open
            receiving.clear()
            sending.clear()

    def close(self) -> None:
        self._group = None


class NcclBroadcast:
    """An NCCL broadcast between CUDA devices."""

    def __init__(
        self, store: dist.Store, rank: int, world: int, address: str, device: torch.device, limit: float
    ) -> None:
        """`limit`: the longest limit of any broadcast."""
        os.environ.update(network_environment(address))
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limit)
        variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(variable)
        os.environ[variable] = "0"  # otherwise torch ends this process when another member dies
        try:
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world, options)
        finally:
            if before is None:
                os.environ.pop(variable)
            else:
                os.environ[variable] = before
        self._device = device

    def broadcast(self, memory: Tensor, limit: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        deadline = time.monotonic() + limit
        with torch.cuda.device(self._device):
            work = self._group.broadcast([memory], options)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"NCCL has not sent a bucket of weights after {limit:g} s.")
                time.sleep(POLL_SECONDS)
            work.wait()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None


# --- the group ----------------------------------------------------------------------------------------------


class BroadcastGroup:
    """One member of the group. Rank 0 sends, the others receive."""

    def __init__(
        self, rendezvous: Rendezvous, rank: int, device: torch.device, store: dist.TCPStore, address: str
    ) -> None:
        """`address`: by which the other members reach this one. All members must have set their device in the
        store before."""
        self.rendezvous = rendezvous
        world = rendezvous.world
        kinds = {store.get(f"device/{member}").decode() for member in range(world)}
        group_store = dist.PrefixStore("group", store)
        self._bytes: ByteTransport
        if kinds == {"cuda"}:
            self.device = device
            self._bytes = NcclBroadcast(group_store, rank, world, address, device, rendezvous.limit)
        else:
            self.device = torch.device("cpu")
            self._bytes = GlooChain(group_store, rank, world, address, SETTLE)
        self._connect()
        store.set_timeout(timedelta(seconds=rendezvous.limit))
        self._store: dist.TCPStore | None = store
        self._send_thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._sending: deque[Future[None]] = deque()
        self._bucket_count = 0
        self._deleted_count = 0
        self._memories: list[Tensor] = []
        self._next_memory = 0

    def _connect(self) -> None:
        """Broadcast one byte: connections are made by the first bytes, and an error must show now."""
        try:
            self._bytes.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), SETTLE)
        except BaseException:
            self._bytes.close()
            raise

    def send(self, contents: str, memory: Tensor) -> None:
        """Begin to send a bucket; `memory` must not change until `wait` has returned for it."""
        assert self._store is not None, "the group was left"
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()  # another thread sends it
        self._store.set(f"bucket/{self._bucket_count}", contents)
        self._bucket_count += 1
        self._sending.append(self._send_thread.submit(self._bytes.broadcast, memory, self.rendezvous.limit))

    def receive(self) -> tuple[str, Tensor]:
        """Return the next bucket. Its memory is used again after BUCKETS_IN_MEMORY buckets."""
        try:
            assert self._store is not None, "the group was left"
            contents = self._store.get(f"bucket/{self._bucket_count}").decode()
            self._bucket_count += 1
            memory = self._memory_for(contents)
            self._bytes.broadcast(memory, self.rendezvous.limit)
        except Exception as error:  # noqa: BLE001 - torch has many types for a connection that ended
            self.leave()
            raise GroupBroken(_first_line(error)) from None
        return contents, memory

    def wait(self, left: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait until at most `left` buckets are being sent. `check` may raise when a member is known to be
        gone."""
        while len(self._sending) > left:
            while not self._sending[0].done():
                check()
                time.sleep(POLL_SECONDS)
            try:
                self._sending[0].result()
            except RuntimeError as error:
                raise GroupBroken(_first_line(error)) from None
            self._sending.popleft()

    def release_memory(self) -> None:
        """All buckets were loaded. Host memory stays for the next version; sampling needs the GPU memory."""
        if self.device.type == "cuda":
            self._memories = []

    def delete_contents(self) -> None:
        """All members have all buckets, so their entries in the store can go."""
        assert self._store is not None, "the group was left"
        for number in range(self._deleted_count, self._bucket_count):
            self._store.delete_key(f"bucket/{number}")
        self._deleted_count = self._bucket_count

    def leave(self) -> None:
        """Leave the group and close its connections.

        A connection closes when nothing refers to it any more. A running broadcast does, and mostly fails
        within CLOSE_SECONDS; otherwise it is abandoned until its limit.
        """
        self._send_thread.shutdown(wait=False, cancel_futures=True)
        wait([bucket for bucket in self._sending if not bucket.cancelled()], CLOSE_SECONDS)
        self._sending.clear()
        self._bytes.close()
        self._store = None
        self._memories = []

    def _memory_for(self, contents: str) -> Tensor:
        """Return memory that is not read any more: an update loads buckets in turn, and has loaded all of
        them when the next update begins."""
        if json.loads(contents)["first"]:
            self._next_memory = 0
        else:
            self._next_memory %= BUCKETS_IN_MEMORY
        needed = bytes_of(contents)
        if self._next_memory == len(self._memories):
            self._memories.append(torch.empty(0, dtype=torch.uint8))
        if len(self._memories[self._next_memory]) < needed:
            self._memories[self._next_memory] = torch.empty(needed, dtype=torch.uint8, device=self.device)
        self._next_memory += 1
        return self._memories[self._next_memory - 1][:needed]


# --- forming a group ----------------------------------------------------------------------------------------


def host_group(
    address: str,
    others: int,
    device: torch.device,
    limit: float,
    invite: Callable[[Rendezvous], Callable[[], None]],
) -> BroadcastGroup:
    """Form a group as rank 0, which the others reach at `address`.

    `invite` makes the others join. It returns a function that raises when one of them has failed.
    """
    store = dist.TCPStore(address, 0, None, True, timeout=timedelta(seconds=SETTLE), wait_for_workers=False)
    store.set("device/0", device.type)
    rendezvous = Rendezvous(address, store.port, others + 1, limit)
    check = invite(rendezvous)
    missing = [f"device/{member}" for member in range(1, rendezvous.world)]
    deadline = time.monotonic() + SETTLE
    while missing and time.monotonic() < deadline:
        check()
        missing = [key for key in missing if not store.check([key])]
        time.sleep(POLL_SECONDS)
    if missing:
        raise GroupBroken(
            f"{len(missing)} of {others} replicas did not come to {address}:{rendezvous.port} within "
            f"{SETTLE:g} s."
        )
    store.set("complete", "")
    try:
        return BroadcastGroup(rendezvous, 0, device, store, address)
    except RuntimeError as error:
        raise GroupBroken(_first_line(error)) from None


def join_group(rendezvous: Rendezvous, rank: int, device: torch.device) -> BroadcastGroup:
    """Join a group that another process hosts."""
    try:
        timeout = timedelta(seconds=SETTLE)
        store = dist.TCPStore(
            rendezvous.host, rendezvous.port, None, False, timeout=timeout, wait_for_workers=False
        )
        store.set(f"device/{rank}", device.type)
        store.wait(["complete"], timeout)  # members connect only when all are there
        return BroadcastGroup(rendezvous, rank, device, store, address_towards(rendezvous.host))
    except RuntimeError as error:
        raise GroupBroken(_first_line(error)) from None


def bytes_of(contents: str) -> int:
    """Return the size of a bucket."""
    return int(json.loads(contents)["bytes"])


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
