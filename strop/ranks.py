"""The processes of a run, and what they say to each other about plain values. One process is the simplest case of many.

Every rank runs the same program and holds the same batch; only sampling, scoring and passes over models are divided. What one
rank finds out is therefore either told to all (`gather`, `summed`), or everybody fails together (`together`): a rank that waits
for one that has failed would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from strop.errors import REFUSED, exit_code

T = TypeVar("T")


class SharedFailure(ValueError):
    """A failure of one rank that every rank knows of."""

    told_by_another: bool = False
    """Whether another rank tells people about it."""
    exit_code: int = REFUSED
    """Of the process that ends with it."""


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1

    @property
    def lead(self) -> bool:
        """Whether this rank writes files and speaks to people."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What every rank says, in the order of ranks."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def from_lead(self, value: T) -> T:
        """What rank 0 says; the `value` of the others is not looked at."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        box = [value if self.lead else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def summed(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers of all ranks added up by name, in double precision and in the order of ranks."""
        totals: dict[str, float] = {}
        for mine in self.gather(dict(numbers)):
            for name, value in mine.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def first_to_claim(self, name: str) -> bool:
        """Whether no rank asked for `name` before. Needs no answer from the others, so they may be busy."""
        if self.world == 1:
            return True
        from torch.distributed.distributed_c10d import _get_default_store

        return int(_get_default_store().add(f"strop/claim/{name}", 1)) == 1

    def together(self, work: Callable[[], T], doing: str) -> T:
        """What `work` returns here. If it raises on any rank, every rank raises, and the message names the rank.

        There must be no exchange between ranks inside `work`.
        """
        if self.world == 1:
            return work()
        result: Any = None
        problem: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            problem = error
        told = self.gather(None if problem is None else (f"{type(problem).__name__}: {problem}", exit_code(problem)))
        failed = [(rank, *said) for rank, said in enumerate(told) if said is not None]
        if failed:
            rank, text, code = failed[0]
            others = f" So did {len(failed) - 1} other rank(s)." if len(failed) > 1 else ""
            failure = SharedFailure(f"Rank {rank} of {self.world} failed {doing}: {text}{others}")
            failure.exit_code = code
            raise failure from problem
        return result

    def agree(self, what: str, value: str) -> None:
        """Refuse to go on when ranks see different things; `what` names the thing and the key behind it."""
        said = self.gather(value)
        odd = [rank for rank, other in enumerate(said) if other != said[0]]
        if odd:
            raise SharedFailure(
                f"Ranks disagree about {what}: rank 0 has {said[0]}, rank {odd[0]} has {said[odd[0]]}. All of them must read "
                "the same files with the same configuration."
            )
