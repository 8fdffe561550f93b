"""The long tail of sampling: a rank whose engine has free rows answers prompts that wait on another rank.

Prompts are dealt as before, and what an engine can run at once stays where it was dealt. What is left over on any rank may be
taken by whoever has room first; the samples of a prompt have random streams of their own, so it does not matter who makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strop.ranks import Ranks
from strop.types import Prompt

Numbered = tuple[int, Prompt]
ROUNDS = itertools.count()
"""Numbers of the deals between ranks. All ranks deal equally often, and a claim lasts as long as they do."""


@dataclass(frozen=True)
class Surplus:
    """Prompts that do not fit at once, by the rank they were dealt to."""

    ranks: Ranks
    name: str
    """Of this round of sampling: the same on all ranks, and no other round's."""
    shares: Sequence[Sequence[Numbered]]

    def taken(self) -> Iterator[Numbered]:
        """Prompts for this rank, as long as there are any: its own in their order, then those of others from the end."""
        world, rank = self.ranks.world, self.ranks.rank
        for owner in ((rank + step) % world for step in range(world)):
            share = self.shares[owner]
            for numbered in share if owner == rank else reversed(share):
                if self.ranks.first_to_claim(f"{self.name}/{numbered[0]}"):
                    yield numbered


def left_over(shares: Sequence[Sequence[Numbered]], fit: int) -> list[Sequence[Numbered]]:
    """Of each rank's prompts, those beyond the `fit` that its engine runs at once."""
    return [share[fit:] for share in shares]
