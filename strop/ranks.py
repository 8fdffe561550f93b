"""The ranks of a run, and collective operations on plain Python values. One process is a world of size 1.

Every rank runs the same program and holds the same batch; only sampling, scoring and model passes are
sharded. Results of one rank are therefore gathered on all ranks (`all_gather_object`, `all_reduce_sum`). If
one rank fails, all ranks fail (`run_or_raise_on_all`): a rank that waits for a failed rank would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from strop.errors import REFUSED, exit_code
from strop.stopping import StopRequested, droppable, first_request

T = TypeVar("T")

STAGE = "stage"
"""Name of a dimension of the device meshes that have all ranks of one pipeline stage."""


class SharedFailure(ValueError):
    """A failure of one rank that all ranks know of."""

    reported_by_other_rank: bool = False
    """Whether another rank prints the message."""
    exit_code: int = REFUSED
    """Exit code of the process that ends with this failure."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the world size, with collective operations."""

    rank: int = 0
    world: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def all_gather_object(self, value: T) -> list[T]:
        """All-gather: the values of all ranks, in the order of ranks."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: T) -> T:
        """Broadcast: the value of rank 0; the `value` of other ranks is ignored."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        box = [value if self.is_rank0 else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def all_reduce_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The sums of the numbers of all ranks by name, in double precision and in the order of ranks."""
        totals: dict[str, float] = {}
        for mine in self.all_gather_object(dict(numbers)):
            for name, value in mine.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def first_to_claim(self, name: str) -> bool:
        """Whether this rank is the first to claim `name`. It is not collective: other ranks may be busy."""
        if self.world == 1:
            return True
        from torch.distributed.distributed_c10d import _get_default_store

        return int(_get_default_store().add(f"strop/claim/{name}", 1)) == 1

    def run_or_raise_on_all(self, work: Callable[[], T], doing: str, *, can_drop: bool = False) -> T:
        """The result of `work` on this rank. If it raises on any rank, all ranks raise, and the message names
        the rank.

        `work` must contain no collective operation. `can_drop`: a signal that ends the run interrupts it,
        and all ranks raise StopRequested.
        """
        if self.world == 1:
            with droppable(can_drop):
                return work()
        result: Any = None
        problem: Exception | None = None
        stop: int | None = None
        try:
            with droppable(can_drop):
                result = work()
        except StopRequested as request:
            stop = request.number
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            problem = error
        report = None
        if problem is not None:
            report = (f"{type(problem).__name__}: {problem}", exit_code(problem))
        gathered = self.all_gather_object((report, stop))
        asked = first_request([number for _, number in gathered])
        if asked is not None:
            raise StopRequested(asked)
        reports = [found for found, _ in gathered]
        failed = [(rank, *found) for rank, found in enumerate(reports) if found is not None]
        if failed:
            rank, text, code = failed[0]
            others = f" So did {len(failed) - 1} other rank(s)." if len(failed) > 1 else ""
            failure = SharedFailure(f"Rank {rank} of {self.world} failed {doing}: {text}{others}")
            failure.exit_code = code
            raise failure from problem
        return result

    def check_equal(self, what: str, value: str) -> None:
        """Raise if ranks have different values; `what` names the value and its configuration key."""
        values = self.all_gather_object(value)
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            raise SharedFailure(
                f"Ranks disagree about {what}: rank 0 has {values[0]}, rank {different[0]} has "
                f"{values[different[0]]}. All of them must read the same files with the same configuration."
            )
