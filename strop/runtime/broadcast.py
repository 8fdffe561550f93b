"""Weights from one process to many at once: a group of processes beside the one that ranks train in.

The first member meets the others at a store that it hosts, where it also tells what each bucket holds; the bytes travel by
NCCL when every member has a CUDA device, else by gloo (carriers.py). A member that fails leaves, which closes its connections,
so that nobody waits for it in vain: all others fail as well, and the group is formed anew.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.runtime.carriers import LOOK, Carrier, Chain, Nccl

SETTLE = 30.0
"""Seconds in which members must meet, all of which are up when they are called."""
MOMENT = 2.0
"""Seconds in which a connection that was closed is noticed."""
TAKEN_LATER = 3
"""Buckets that a member holds at most: one is received while another waits and a third is taken."""


class GroupBroken(Exception):
    """A member is gone, or does not answer within the limit."""


@dataclass(frozen=True)
class Meeting:
    """Where members meet, and who they are."""

    host: str
    port: int
    world: int
    limit: float
    """Seconds that a bucket may take."""


class Group:
    """One member's end. The first member sends, the others receive; nothing is shared with the default process group."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, store: dist.TCPStore, address: str) -> None:
        """`address`: by which the other members can reach this one. All of them must have told the store of their devices."""
        self.meeting = meeting
        kinds = {store.get(f"device/{member}").decode() for member in range(meeting.world)}
        place = dist.PrefixStore("group", store), rank, meeting.world, address
        self._carrier: Carrier
        if kinds == {"cuda"}:
            self.device, self._carrier = device, Nccl(*place, device, meeting.limit)
        else:
            self.device, self._carrier = torch.device("cpu"), Chain(*place, SETTLE)
        self._say_hello()
        store.set_timeout(timedelta(seconds=meeting.limit))
        self._store: Any = store
        self._line = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._under_way: deque[Future[None]] = deque()
        self._count = self._forgotten = 0
        self._memories: list[Tensor] = []
        self._turn = 0

    def _say_hello(self) -> None:
        """Connections are made by the first bytes: it is better known now whether they can be."""
        try:
            self._carrier.carry(torch.zeros(1, dtype=torch.uint8, device=self.device), SETTLE)
        except BaseException:
            self._carrier.close()
            raise

    def send(self, contents: str, memory: Tensor) -> None:
        """Begin to send a bucket; `memory` must stay as it is until it was awaited."""
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()  # another thread sends it
        self._store.set(f"bucket/{self._count}", contents)
        self._count += 1
        self._under_way.append(self._line.submit(self._carrier.carry, memory, self.meeting.limit))

    def receive(self) -> tuple[str, Tensor]:
        """The next bucket, in memory that is used again for the bucket after the next two."""
        try:
            contents = self._store.get(f"bucket/{self._count}").decode()
            self._count += 1
            memory = self._room(contents)
            self._carrier.carry(memory, self.meeting.limit)
        except Exception as error:  # noqa: BLE001 - torch has many names for a connection that ended
            self.leave()
            raise GroupBroken(_first_line(error)) from None
        return contents, memory

    def wait(self, left: int, look: Callable[[], None] = lambda: None) -> None:
        """Until at most `left` buckets are under way. `look` may raise when it is known otherwise that a member is gone."""
        while len(self._under_way) > left:
            while not self._under_way[0].done():
                look()
                time.sleep(LOOK)
            try:
                self._under_way[0].result()
            except RuntimeError as error:
                raise GroupBroken(_first_line(error)) from None
            self._under_way.popleft()

    def rest(self) -> None:
        """All buckets so far were taken. Memory stays for the next version, unless it is a device's, which samples in it."""
        if self.device.type == "cuda":
            self._memories = []

    def forget(self) -> None:
        """Everybody has all buckets so far: what they held need not be known any longer."""
        for number in range(self._forgotten, self._count):
            self._store.delete_key(f"bucket/{number}")
        self._forgotten = self._count

    def leave(self) -> None:
        """Connections close when nothing refers to them any more. What is under way does, and has mostly failed in a moment;
        else it is left to itself until the limit."""
        self._line.shutdown(wait=False, cancel_futures=True)
        wait([bucket for bucket in self._under_way if not bucket.cancelled()], MOMENT)
        self._under_way.clear()
        self._carrier.close()
        self._store = None
        self._memories = []

    def _room(self, contents: str) -> Tensor:
        """Memory that nobody reads any more: an update takes buckets in turn, and has taken all when the next begins."""
        self._turn = 0 if json.loads(contents)["first"] else self._turn % TAKEN_LATER
        needed = bytes_of(contents)
        if self._turn == len(self._memories):
            self._memories.append(torch.empty(0, dtype=torch.uint8))
        if len(self._memories[self._turn]) < needed:
            self._memories[self._turn] = torch.empty(needed, dtype=torch.uint8, device=self.device)
        self._turn += 1
        return self._memories[self._turn - 1][:needed]


def host(
    address: str, others: int, device: torch.device, limit: float, invite: Callable[[Meeting], Callable[[], None]]
) -> Group:
    """Form a group as its first member, known to the others by `address`. `invite` makes them join; what it returns raises when
    one of them has failed."""
    store = dist.TCPStore(address, 0, None, True, timeout=timedelta(seconds=SETTLE), wait_for_workers=False)
    store.set("device/0", device.type)
    meeting = Meeting(address, store.port, others + 1, limit)
    look = invite(meeting)
    missing = [f"device/{member}" for member in range(1, meeting.world)]
    deadline = time.monotonic() + SETTLE
    while missing and time.monotonic() < deadline:
        look()
        missing = [key for key in missing if not store.check([key])]
        time.sleep(LOOK)
    if missing:
        raise GroupBroken(f"{len(missing)} of {others} replicas did not come to {address}:{meeting.port} within {SETTLE:g} s.")
    store.set("complete", "")
    try:
        return Group(meeting, 0, device, store, address)
    except RuntimeError as error:
        raise GroupBroken(_first_line(error)) from None


def join(meeting: Meeting, rank: int, device: torch.device) -> Group:
    """Come to a group that another process hosts."""
    try:
        settle = timedelta(seconds=SETTLE)
        store = dist.TCPStore(meeting.host, meeting.port, None, False, timeout=settle, wait_for_workers=False)
        store.set(f"device/{rank}", device.type)
        store.wait(["complete"], settle)  # to connect before all are there would be to wait without looking
        return Group(meeting, rank, device, store, address_towards(meeting.host))
    except RuntimeError as error:
        raise GroupBroken(_first_line(error)) from None


def bytes_of(contents: str) -> int:
    return int(json.loads(contents)["bytes"])


def address_towards(host: str) -> str:
    """The address of this machine in the network by which it reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
