"""Weight sync to rollout replicas: by the object store, by a broadcast, or by files that all machines see.

All replicas have a version when `send` returns. A copy of it stays with the manager of the replicas, which
gives it to a replica that was restarted, without the trainer: references to the object store, or files. A
broadcast leaves no copy, so a spare copy goes to the object store while sampling has already begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from strop.rollout.buckets import pack
from strop.runtime.weight_broadcast import SETTLE, BroadcastGroup, GroupBroken, Rendezvous, host_group

log = logging.getLogger(__name__)

BUCKETS_IN_FLIGHT = 2
"""One bucket is packed while another one is read."""

Weights = Iterable[tuple[str, Tensor]]
Reference = object
"""What `put` returned, or the path of a file. Only the receivers look inside."""


class WeightReceivers(Protocol):
    """The replicas, as a transport sees them."""

    size: int

    def put(self, memory: np.ndarray) -> Reference:
        """Put bytes where every machine can read them; a reference to them."""
        ...

    def load(self, box: Reference, contents: str, version: int) -> Future[None]:
        """Load a bucket into all replicas. `box`: a reference from `put`, or the path of a file."""
        ...

    def begin_update(self, version: int) -> Sequence[int]:
        """Restart no replica until this version was kept or loaded; the incarnations of the replicas."""
        ...

    def keep_copy(self, buckets: Sequence[tuple[Reference, str]], version: int, why_not: str = "") -> None:
        """Keep a copy for restarted replicas: references and contents, or the reason why there is none."""
        ...

    def address(self) -> str:
        """Return the address by which the replicas reach this machine."""
        ...

    def join(self, number: int, rendezvous: Rendezvous) -> Future[None]:
        """Make a replica join the group."""
        ...

    def receive(self, number: int, version: int) -> Future[None]:
        """Make a replica receive all buckets of a version from its group."""
        ...


class Transport(Protocol):
    """A way to bring weights to all replicas."""

    def send(self, weights: Weights, version: int) -> int:
        """Bring the weights to all replicas; the bytes that each of them got."""
        ...

    def stats(self) -> dict[str, float]:
        """Return the transport's own numbers since the last call."""
        ...

    def close(self) -> None: ...


class ObjectStoreTransport:
    """Each machine fetches a bucket once, and its replicas read it without a copy."""

    def __init__(self, receivers: WeightReceivers, megabytes: int) -> None:
        self._receivers = receivers
        self._memory = BucketMemory(1, megabytes)

    def send(self, weights: Weights, version: int) -> int:
        loads = PendingLoads(self._receivers, version)
        sent = 0
        for number, bucket in enumerate(pack(weights, self._memory.next)):
            if bucket.table:
                loads.add(self._put(bucket.memory.numpy(), version, number), bucket.contents())
                sent += bucket.memory.numel()
        loads.finish()
        return sent

    def _put(self, memory: np.ndarray, version: int, number: int) -> Reference:
        return self._receivers.put(memory)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class FileTransport(ObjectStoreTransport):
    """A file per bucket. The files of a version stay until the next version is complete."""

    def __init__(self, receivers: WeightReceivers, megabytes: int, folder: Path) -> None:
        """`folder` belongs to this run alone: buckets of an earlier run are deleted."""
        super().__init__(receivers, megabytes)
        self._folder = folder
        self._written: set[Path] | None = None

    def send(self, weights: Weights, version: int) -> int:
        if self._written is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._delete_buckets(keep=set())
        self._written = set()
        sent = super().send(weights, version)
        if sent:
            self._delete_buckets(keep=self._written)
        return sent

    def _put(self, memory: np.ndarray, version: int, number: int) -> str:
        path = self._folder / f"bucket_{version}_{number}"
        partial = path.with_suffix(".part")
        memory.tofile(partial)
        partial.replace(path)
        assert self._written is not None
        self._written.add(path)
        return str(path)

    def _delete_buckets(self, keep: set[Path]) -> None:
        for path in set(self._folder.glob("bucket_*")) - keep:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._written is not None:
            self._delete_buckets(keep=set())


class BroadcastTransport:
    """A broadcast to all replicas at once. When a replica dies on the way, the version is completed by the
    object store, from the spare copy."""

    def __init__(
        self, receivers: WeightReceivers, megabytes: int, device: torch.device, limit: float
    ) -> None:
        """`limit`: seconds that a bucket may take, and that the replicas may take after the last one."""
        self._receivers = receivers
        self._device = device
        self._limit = limit
        self._memory = BucketMemory(BUCKETS_IN_FLIGHT, megabytes)
        self._group: BroadcastGroup | None = None
        self._incarnations: list[int] = []
        self._receiving: list[Future[None]] = []
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="spare-weights")
        self._copy_kept: Future[None] | None = None
        self._groups_formed = 0
        self._regroups_reported = 0

    def send(self, weights: Weights, version: int) -> int:
        if self._copy_kept is not None:
            self._copy_kept.result()
        copies: list[tuple[Future[Reference], str]] = []
        sent = 0

        def next_memory(needed: int) -> Tensor:
            if not copies:
                self._begin(version)
            if len(copies) >= BUCKETS_IN_FLIGHT:
                wait([copies[-BUCKETS_IN_FLIGHT][0]])
            self._with_group(lambda group: self._wait(group, BUCKETS_IN_FLIGHT - 1))
            device = self._group.device.type if self._group else "cpu"
            return self._memory.next(needed, device)

        for bucket in pack(weights, next_memory):
            if bucket.table:
                contents = bucket.contents(bytes=bucket.memory.numel())
                copies.append((self._copy_thread.submit(self._copy, bucket.memory), contents))
                self._broadcast(contents, bucket.memory)
                sent += bucket.memory.numel()
        self._with_group(self._finish)
        if sent and self._group is not None:
            self._copy_kept = self._copy_thread.submit(self._keep_copy, copies, version)
        elif sent:
            self._load_copies(copies, version)
        self._memory.release_gpu()
        return sent

    # --- the group ------------------------------------------------------------------------------------------

    def _begin(self, version: int) -> None:
        """Form the group if needed, and make all replicas receive."""
        incarnations = list(self._receivers.begin_update(version))
        if self._group is not None and incarnations != self._incarnations:
            self._leave_group()
        if self._group is None:
            self._form_group(incarnations)
        if self._group is not None:
            replicas = range(self._receivers.size)
            self._receiving = [self._receivers.receive(number, version) for number in replicas]

    def _form_group(self, incarnations: list[int]) -> None:
        joining: list[Future[None]] = []

        def invite(rendezvous: Rendezvous) -> Callable[[], None]:
            for number in range(self._receivers.size):
                joining.append(self._receivers.join(number, rendezvous))
            return lambda: raise_failed(joining)

        try:
            address = self._receivers.address()
            self._group = host_group(address, self._receivers.size, self._device, self._limit, invite)
            for joined in joining:
                joined.result(SETTLE)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the weights go by the object store
            log_broken_group(error)
            self._leave_group()
            return
        self._incarnations = incarnations
        self._groups_formed += 1

    def _with_group(self, step: Callable[[BroadcastGroup], None]) -> None:
        """Do a step if there is a group; leave the group when the step fails."""
        if self._group is None:
            return
        try:
            step(self._group)
        except Exception as error:  # noqa: BLE001 - as in _form_group
            log_broken_group(error)
            self._leave_group()

    def _broadcast(self, contents: str, memory: Tensor) -> None:
        self._with_group(lambda group: group.send(contents, memory))

    def _wait(self, group: BroadcastGroup, left: int) -> None:
        group.wait(left, lambda: raise_failed(self._receiving))

    def _finish(self, group: BroadcastGroup) -> None:
        self._wait(group, 0)
        for received in self._receiving:
            received.result(self._limit)
        group.delete_contents()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None
        self._receiving = []

    # --- the spare copy -------------------------------------------------------------------------------------

    def _copy(self, memory: Tensor) -> Reference:
        return self._receivers.put(memory.cpu().numpy())

    def _keep_copy(self, copies: Sequence[tuple[Future[Reference], str]], version: int) -> None:
        try:
            kept = [(copy.result(), contents) for copy, contents in copies]
            self._receivers.keep_copy(kept, version)
        except ValueError as error:
            log.warning(
                "There is no spare copy of the weights, so a replica that dies now ends the run: %s", error
            )
            self._receivers.keep_copy([], version, str(error))

    def _load_copies(self, copies: Sequence[tuple[Future[Reference], str]], version: int) -> None:
        loads = PendingLoads(self._receivers, version)
        for copy, contents in copies:
            loads.add(copy.result(), contents)
        loads.finish()

    def stats(self) -> dict[str, float]:
        regroups = max(0, self._groups_formed - 1)
        new = regroups - self._regroups_reported
        self._regroups_reported = regroups
        return {"weights_regrouped": float(new)}

    def close(self) -> None:
        self._copy_thread.shutdown(wait=True, cancel_futures=True)
        self._leave_group()


class BucketMemory:
    """Memory of the sender for a few buckets, which are filled in turn."""

    def __init__(self, count: int, megabytes: int) -> None:
        self._size = megabytes << 20
        self._memories = [torch.empty(0, dtype=torch.uint8)] * count
        self._turn = 0

    def next(self, needed: int, device: str = "cpu") -> Tensor:
        """Return memory of at least `needed` bytes."""
        self._turn = (self._turn + 1) % len(self._memories)
        memory = self._memories[self._turn]
        if len(memory) < needed or memory.device.type != device:
            memory = torch.empty(max(needed, self._size), dtype=torch.uint8, device=device)
            self._memories[self._turn] = memory
        return memory

    def release_gpu(self) -> None:
        """Host memory stays for the next version; GPU memory is needed by training."""
        for place, memory in enumerate(self._memories):
            if memory.device.type != "cpu":
                self._memories[place] = torch.empty(0, dtype=torch.uint8)
        self._turn = 0


class PendingLoads:
    """Buckets that the replicas are loading, at most BUCKETS_IN_FLIGHT at once."""

    def __init__(self, receivers: WeightReceivers, version: int) -> None:
        self._receivers = receivers
        self._version = version
        self._pending: list[Future[None]] = []

    def add(self, box: Reference, contents: str) -> None:
        """Begin to load a bucket."""
        self._pending.append(self._receivers.load(box, contents, self._version))
        self._wait(BUCKETS_IN_FLIGHT - 1)

    def finish(self) -> None:
        """Wait for all buckets."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.pop(0).result()


def raise_failed(calls: Sequence[Future[None]]) -> None:
    """Raise the error of a call that has failed already."""
    for call in calls:
        if call.done():
            call.result()


def log_broken_group(error: Exception) -> None:
    """Log why the group broke."""
    text = str(error) if isinstance(error, GroupBroken) else f"{type(error).__name__}: {error}"
    log.warning(
        "The group that broadcasts weights broke, so this version goes through the store: %s", text[-600:]
    )
