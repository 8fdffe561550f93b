"""How weights reach replicas: through the store of the cluster, by a group of processes, or in files that all machines see.

A version is complete when `send` returns. Whoever keeps the replicas can give it to the successor of a dead one without asking
the trainer, which may be in an update: it has references to the store, or to files. The group leaves nothing behind, so a spare
copy goes to the store while sampling has begun already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from strop.rollout.buckets import pack
from strop.runtime.broadcast import SETTLE, Group, GroupBroken, Meeting, host

log = logging.getLogger(__name__)

AHEAD = 2
"""Buckets on their way at once: one is packed while another is read."""

Weights = Iterable[tuple[str, Tensor]]


class Receivers(Protocol):
    """The replicas, as far as weights are concerned."""

    size: int

    def store(self, memory: np.ndarray) -> Any:
        """Put bytes where every machine can have them, and whoever keeps the replicas can keep them; a reference."""
        ...

    def load(self, box: Any, contents: str, version: int) -> Future[Any]:
        """Give a bucket to all replicas. `box`: a reference from `store`, or the path of a file."""
        ...

    def expect(self, version: int) -> Sequence[int]:
        """Until this version is kept or loaded, successors of dead replicas wait for it. The lives of the replicas."""
        ...

    def keep(self, buckets: Sequence[tuple[Any, str]], version: int, why_not: str = "") -> None:
        """What successors of dead replicas are given: references and contents, or why there is nothing."""
        ...

    def address(self) -> str:
        """By which the machines of the replicas know this one."""
        ...

    def join(self, number: int, meeting: Meeting) -> Future[Any]: ...

    def receive(self, number: int, version: int) -> Future[Any]:
        """A replica takes all buckets of a version from its group."""
        ...


class Transport(Protocol):
    def send(self, weights: Weights, version: int) -> int:
        """All replicas have the weights when it returns; bytes that each of them got."""
        ...

    def stats(self) -> dict[str, float]:
        """Numbers of its own since it was last asked."""
        ...

    def close(self) -> None: ...


class ByStore:
    """Each machine fetches a bucket once, and its replicas read it without a copy."""

    def __init__(self, receivers: Receivers, megabytes: int) -> None:
        self._receivers = receivers
        self._memory = Memory(1, megabytes)

    def send(self, weights: Weights, version: int) -> int:
        loads, sent = Loads(self._receivers, version), 0
        for number, bucket in enumerate(pack(weights, self._memory.next)):
            if bucket.table:
                loads.add(self._put(bucket.memory.numpy(), version, number), bucket.contents())
                sent += bucket.memory.numel()
        loads.finish()
        return sent

    def _put(self, memory: np.ndarray, version: int, number: int) -> Any:
        return self._receivers.store(memory)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class ByFile(ByStore):
    """A file per bucket. Those of a version stay until the next one is complete."""

    def __init__(self, receivers: Receivers, megabytes: int, folder: Path) -> None:
        """`folder` belongs to this run alone: what an earlier one left there is deleted."""
        super().__init__(receivers, megabytes)
        self._folder = folder
        self._written: set[Path] | None = None

    def send(self, weights: Weights, version: int) -> int:
        if self._written is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._delete_others(set())
        self._written = set()
        sent = super().send(weights, version)
        if sent:
            self._delete_others(self._written)
        return sent

    def _put(self, memory: np.ndarray, version: int, number: int) -> str:
        path = self._folder / f"bucket_{version}_{number}"
        aside = path.with_suffix(".part")
        memory.tofile(aside)
        aside.replace(path)
        assert self._written is not None
        self._written.add(path)
        return str(path)

    def _delete_others(self, kept: set[Path]) -> None:
        for path in set(self._folder.glob("bucket_*")) - kept:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._written is not None:
            self._delete_others(set())


class ByGroup:
    """Sent to all at once. When a member dies on the way, the version is completed through the store, from the spare copy."""

    def __init__(self, receivers: Receivers, megabytes: int, device: torch.device, limit: float) -> None:
        """`limit`: seconds that a bucket may take, and the replicas after the last."""
        self._receivers, self._device, self._limit = receivers, device, limit
        self._memory = Memory(AHEAD, megabytes)
        self._group: Group | None = None
        self._lives: list[int] = []
        self._receipts: list[Future[Any]] = []
        self._spare = ThreadPoolExecutor(1, thread_name_prefix="spare-weights")
        self._kept: Future[None] | None = None
        self._formed = self._told = 0

    def send(self, weights: Weights, version: int) -> int:
        if self._kept is not None:
            self._kept.result()
        copies: list[tuple[Future[Any], str]] = []
        sent = 0

        def room(needed: int) -> Tensor:
            if not copies:
                self._begin(version)
            if len(copies) >= AHEAD:
                wait([copies[-AHEAD][0]])
            self._attempt(self._await, AHEAD - 1)
            return self._memory.next(needed, self._group.device.type if self._group else "cpu")

        for bucket in pack(weights, room):
            if bucket.table:
                contents = bucket.contents(bytes=bucket.memory.numel())
                copies.append((self._spare.submit(self._copy, bucket.memory), contents))
                self._attempt(self._hand_over, contents, bucket.memory)
                sent += bucket.memory.numel()
        self._attempt(self._finish)
        if sent and self._group is not None:
            self._kept = self._spare.submit(self._keep, copies, version)
        elif sent:
            self._complete(copies, version)
        self._memory.rest()
        return sent

    # --- the group -------------------------------------------------------------------------------------------------------

    def _begin(self, version: int) -> None:
        lives = list(self._receivers.expect(version))
        if self._group is not None and lives != self._lives:
            self._part()
        if self._group is None:
            self._form(lives)
        if self._group is not None:
            self._receipts = [self._receivers.receive(number, version) for number in range(self._receivers.size)]

    def _form(self, lives: list[int]) -> None:
        joining: list[Future[Any]] = []

        def invite(meeting: Meeting) -> Callable[[], None]:
            joining.extend(self._receivers.join(number, meeting) for number in range(self._receivers.size))
            return lambda: _raise_failed(joining)

        try:
            self._group = host(self._receivers.address(), self._receivers.size, self._device, self._limit, invite)
            for done in joining:
                done.result(SETTLE)
        except Exception as error:  # noqa: BLE001 - whatever became of a replica, the weights go another way
            _tell(error)
            self._part()
            return
        self._lives = lives
        self._formed += 1

    def _attempt(self, step: Callable[..., None], *arguments: Any) -> None:
        """Do something with the group if it is whole; it is left when that fails."""
        if self._group is None:
            return
        try:
            step(self._group, *arguments)
        except Exception as error:  # noqa: BLE001 - as above
            _tell(error)
            self._part()

    def _await(self, group: Group, left: int) -> None:
        group.wait(left, lambda: _raise_failed(self._receipts))

    def _hand_over(self, group: Group, contents: str, memory: Tensor) -> None:
        group.send(contents, memory)

    def _finish(self, group: Group) -> None:
        self._await(group, 0)
        for receipt in self._receipts:
            receipt.result(self._limit)
        group.forget()

    def _part(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group, self._receipts = None, []

    # --- the spare copy --------------------------------------------------------------------------------------------------

    def _copy(self, memory: Tensor) -> Any:
        return self._receivers.store(memory.cpu().numpy())

    def _keep(self, copies: Sequence[tuple[Future[Any], str]], version: int) -> None:
        try:
            self._receivers.keep([(copy.result(), contents) for copy, contents in copies], version)
        except ValueError as error:
            log.warning("There is no spare copy of the weights, so a replica that dies now ends the run: %s", error)
            self._receivers.keep([], version, str(error))

    def _complete(self, copies: Sequence[tuple[Future[Any], str]], version: int) -> None:
        loads = Loads(self._receivers, version)
        for copy, contents in copies:
            loads.add(copy.result(), contents)
        loads.finish()

    def stats(self) -> dict[str, float]:
        again, self._told = max(0, self._formed - 1) - self._told, max(0, self._formed - 1)
        return {"weights_regrouped": float(again)}

    def close(self) -> None:
        self._spare.shutdown(wait=True, cancel_futures=True)
        self._part()


class Memory:
    """Memory for buckets that are filled in turn."""

    def __init__(self, count: int, megabytes: int) -> None:
        self._size = megabytes << 20
        self._pieces = [torch.empty(0, dtype=torch.uint8)] * count
        self._turn = 0

    def next(self, needed: int, device: str = "cpu") -> Tensor:
        self._turn = (self._turn + 1) % len(self._pieces)
        piece = self._pieces[self._turn]
        if len(piece) < needed or piece.device.type != device:
            piece = torch.empty(max(needed, self._size), dtype=torch.uint8, device=device)
            self._pieces[self._turn] = piece
        return piece

    def rest(self) -> None:
        """Memory stays for the next version, unless it is a device's, which learns in it."""
        self._pieces = [piece if piece.device.type == "cpu" else torch.empty(0, dtype=torch.uint8) for piece in self._pieces]
        self._turn = 0


class Loads:
    """Buckets that replicas are loading."""

    def __init__(self, receivers: Receivers, version: int) -> None:
        self._receivers, self._version = receivers, version
        self._under_way: list[Future[Any]] = []

    def add(self, box: Any, contents: str) -> None:
        self._under_way.append(self._receivers.load(box, contents, self._version))
        self._wait(AHEAD - 1)

    def finish(self) -> None:
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._under_way) > left:
            self._under_way.pop(0).result()


def _raise_failed(asked: Sequence[Future[Any]]) -> None:
    for done in asked:
        if done.done():
            done.result()


def _tell(error: Exception) -> None:
    said = str(error) if isinstance(error, GroupBroken) else f"{type(error).__name__}: {error}"
    log.warning("The group that broadcasts weights broke, so this version goes through the store: %s", said[-600:])
