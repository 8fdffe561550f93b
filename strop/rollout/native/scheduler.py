"""Who runs when, in plain integers.

Samples wait in order of arrival and run in rows 0, 1, 2 ... without holes: when one ends, the last row moves into its place.
The cache is a rectangle of rows x capacity tokens with a budget for its area. Samples are admitted while what they hold and a
little headroom fit; if the rectangle then grows too large, those admitted last go back to the head of the queue and later
compute their tokens again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Sample:
    """One completion on its way."""

    request: int
    """Samples of one request share their prompt."""
    index: int
    prompt: Sequence[int]
    limit: int
    """Most tokens, prompt included."""
    settings: Any = None
    tokens: list[int] = field(default_factory=list)
    """What it had sampled when it was sent back to the queue."""
    log_probs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class Admission:
    """A sample that takes a row. What it lacks of its sequence is computed, or copied from another row."""

    sample: Sample
    row: int
    donor: int | None = None
    """A row whose first `shared` tokens are its own; its keys and values are copied."""
    shared: int = 0
    leader: int | None = None
    """A row admitted at the same time with the very same tokens; even its logits are shared."""


class Scheduler:
    def __init__(self, *, max_rows: int, budget: int, block: int = 64) -> None:
        """`budget`: area of the cache in tokens. Capacities are multiples of `block`, which is also the headroom."""
        self.max_rows, self.budget, self.block = max_rows, budget, block
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.lengths: list[int] = []
        """Tokens of each running row; between two looks at the device, an upper bound."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def too_long(self, tokens: int) -> str | None:
        """Why a sequence of so many tokens can never run, or None."""
        if tokens <= self.budget:
            return None
        return f"up to {tokens} tokens are asked for and the cache holds {self.budget}; give it more memory or ask for less"

    def add(self, samples: Iterable[Sample]) -> None:
        self.waiting.extend(samples)

    def admit(self) -> list[Admission]:
        """Samples from the head of the queue into free rows, shortest first so that neighbours have similar lengths."""
        taken: list[Sample] = []
        longest = max(self._needs(), default=0)
        while self.waiting and len(self.running) + len(taken) < self.max_rows:
            need = max(longest, self._need(self.waiting[0], self.waiting[0].length))
            if (len(self.running) + len(taken) + 1) * need > self.budget:
                break
            longest = need
            taken.append(self.waiting.popleft())
        donors = {sample.request: row for row, sample in enumerate(self.running)}
        leaders: dict[int, int] = {}
        admissions = []
        for sample in sorted(taken, key=lambda s: s.length):
            admissions.append(self._place(sample, donors, leaders))
        return admissions

    def _place(self, sample: Sample, donors: dict[int, int], leaders: dict[int, int]) -> Admission:
        row = len(self.running)
        self.running.append(sample)
        self.lengths.append(sample.length)
        if sample.request in donors:
            # The last token is always computed: its logits are needed.
            return Admission(sample, row, donor=donors[sample.request], shared=min(len(sample.prompt), sample.length - 1))
        if sample.tokens:
            return Admission(sample, row)
        if sample.request in leaders:
            return Admission(sample, row, leader=leaders[sample.request])
        leaders[sample.request] = row
        return Admission(sample, row)

    def shape(self) -> tuple[int, int]:
        """Rows and columns the cache should have: room to the end for all rows and some more, if that fits the budget."""
        count = len(self.running)
        wanted = self._rounded(max((sample.limit for sample in self.running), default=0))
        rows = min(self.max_rows, 1 << max(0, count - 1).bit_length())
        if rows * wanted <= self.budget:
            return rows, wanted
        return count, min(wanted, self.budget // max(1, count))

    def make_room(self) -> list[tuple[int, Sample]]:
        """Rows, from the last, that must give way so that the others can go on; the caller hands them back with `requeue`."""
        rows = len(self.running)
        needs = list(self._needs())
        while rows > 1 and rows * max(needs[:rows]) > self.budget:
            rows -= 1
        return [(row, self.running[row]) for row in range(len(self.running) - 1, rows - 1, -1)]

    def requeue(self, evicted: Sequence[tuple[int, Sample]]) -> None:
        """Back to the head of the queue, in their old order."""
        for row, sample in evicted:
            assert row == len(self.running) - 1
            self.running.pop()
            self.lengths.pop()
            self.waiting.appendleft(sample)

    def release(self, rows: Iterable[int]) -> list[tuple[int, int]]:
        """Take ended rows out; returns the moves (from, to) that close the gaps, to be done all at once."""
        ended = set(rows)
        left = len(self.running) - len(ended)
        movers = [row for row in range(left, len(self.running)) if row not in ended]
        holes = sorted(row for row in ended if row < left)
        moves = list(zip(movers, holes))
        for source, target in moves:
            self.running[target] = self.running[source]
            self.lengths[target] = self.lengths[source]
        del self.running[left:], self.lengths[left:]
        return moves

    def clear(self) -> list[Sample]:
        """Forget everything; returns what was waiting."""
        waiting = list(self.waiting)
        self.waiting.clear()
        self.running.clear()
        self.lengths.clear()
        return waiting

    def _needs(self) -> Iterable[int]:
        return (self._need(sample, length) for sample, length in zip(self.running, self.lengths))

    def _need(self, sample: Sample, length: int) -> int:
        return min(sample.limit, length + self.block)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block
