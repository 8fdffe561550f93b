"""Who runs when, in plain integers.

Samples wait in order of arrival and run in rows 0, 1, 2 ... without holes: when one ends, the last row moves into its place.
The cache is a rectangle of rows x capacity tokens with a budget for its area. Samples are admitted while what they hold and a
little headroom fit; if the rectangle then grows too large, those admitted last go back to the head of the queue and later
compute their tokens again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.rollout.native.prefix import Holder, Prefixes, marks

_WORTH_WAITING = 64
"""Tokens in common with a row seated at the same time that are worth a forward pass of their own before the others."""


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
    stream: int = 0
    """Name of its random stream."""
    listener: Callable[[list[int], list[float]], None] | None = None
    """Told of new tokens and their log-probs."""
    lasting: bool = False
    """It is a turn of a conversation, which may go on."""
    tokens: list[int] = field(default_factory=list)
    """What it had sampled when the host last looked."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Weights that sampled `tokens`: (version, how many), in order."""
    told: int = 0
    """Sampled tokens that the listener was told of already."""
    holder: Holder | None = None
    """How others find what its row holds; None where another row of the same tokens stands for it."""
    fed: int = 0
    """Tokens that its row was given in part by decode steps (see `Admission.fed`): all are computed when it has more."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(frozen=True)
class Admission:
    """A seated sample. What it lacks of its sequence is computed, or copied from another row."""

    sample: Sample
    row: int
    donor: int | None = None
    """A row whose first `shared` tokens are its own; its keys and values are copied."""
    shared: int = 0
    later: bool = False
    """The donor, or the leader's, is seated at the same time: it is computed first."""
    leader: int | None = None
    """A row seated at the same time with the very same tokens; even its logits are shared."""
    fed: bool = False
    """It lacks so little that decode steps take it along: they give it its next token instead of sampling one."""


class Scheduler:
    def __init__(self, *, max_rows: int, budget: int, block: int = 64, gather: float = 0.0, feed: int = 0) -> None:
        """`budget`: area of the cache in tokens. Capacities are multiples of `block`, which is also the headroom.

        `gather`: while the queue is longer than the free rows, newcomers wait until they are this share of all rows, so that
        few large passes compute their prompts instead of many small ones. `feed`: most tokens that a sequence whose beginning
        is computed may lack to get them in decode steps.
        """
        self.max_rows, self.budget, self.block, self.gather, self.feed = max_rows, budget, block, gather, feed
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.lengths: list[int] = []
        """Tokens of each running row; between two looks at the device, an upper bound."""
        self.prefixes = Prefixes()

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

    def seat(self) -> list[Sample]:
        """Samples from the head of the queue into free rows, shortest first so that neighbours have similar lengths."""
        taken: list[Sample] = []
        longest = max(self._needs(), default=0)
        while self.waiting and len(self.running) + len(taken) < self.max_rows:
            need = max(longest, self._need(self.waiting[0], self.waiting[0].length))
            if (len(self.running) + len(taken) + 1) * need > self.budget:
                break
            longest = need
            taken.append(self.waiting.popleft())
        if self.running and self.waiting and len(taken) < self.gather * (len(self.running) + len(taken)):
            self.waiting.extendleft(reversed(taken))
            return []
        taken.sort(key=lambda sample: sample.length)
        self.running += taken
        self.lengths += [sample.length for sample in taken]
        return taken

    def share(self, first: int, rows: int) -> tuple[list[Admission], list[tuple[int, int]]]:
        """Where the rows from `first` on find what is computed already, in a cache of so many rows.

        Also the moves (from, to) of ended sequences that are in their way. Moves, and copies from donors that are not `later`,
        are to be done all at once: both name rows as they are now.
        """
        siblings = {sample.request: row for row, sample in enumerate(self.running[:first]) if not sample.fed}
        leaders: dict[tuple[int, ...], Admission] = {}
        fresh = Prefixes()
        admissions = []
        for row in range(first, len(self.running)):
            sample = self.running[row]
            sequence = tuple(sample.sequence)
            if sequence in leaders:
                leader = leaders[sequence]
                admissions.append(Admission(sample, row, later=leader.later, leader=leader.row))
                continue
            sample.holder = Holder(row, sequence, marks(sequence), sample.lasting)
            admission = self._donor(sample, sample.holder, siblings.get(sample.request), fresh)
            admissions.append(admission)
            sample.fed = len(sequence) if admission.fed else 0
            if admission.fed:
                # What decode steps are yet to compute cannot be copied by others.
                computed = sequence[: admission.shared]
                sample.holder = Holder(row, computed, marks(computed), sample.lasting)
            else:
                leaders[sequence] = admission
            if not admission.later:
                fresh.add(sample.holder)
        for admission in admissions:
            if admission.sample.holder is not None:
                self.prefixes.add(admission.sample.holder)
        return admissions, self.prefixes.make_way(first, len(self.running), rows)

    def _donor(self, sample: Sample, own: Holder, sibling: int | None, fresh: Prefixes) -> Admission:
        """The row that has most of a sequence: a running sample of the same request, any other, or one in `fresh`."""
        donor, shared, later = sibling, len(sample.prompt) if sibling is not None else 0, False
        match = self.prefixes.find(own.tokens, own.marks)
        if match is not None and match.shared > shared:
            donor, shared = match.holder.row, match.shared
            if shared == len(match.holder.tokens):
                self.prefixes.outgrown.append(match.holder)  # the newcomer holds the same and more
        beside = fresh.find(own.tokens, own.marks)
        if beside is not None and beside.shared >= shared + _WORTH_WAITING:
            donor, shared, later = beside.holder.row, beside.shared, True
        # The last token is always computed: its logits are needed.
        shared = min(shared, len(own.tokens) - 1)
        return Admission(sample, own.row, donor, shared, later, fed=0 < len(own.tokens) - shared <= self.feed and shared > 0)

    def shape(self, spare: int = 0) -> tuple[int, int]:
        """Rows and columns the cache should have: room to the end for all rows and some more, if that fits the budget.

        `spare`: rows to keep ended conversations in, if there is memory for them too.
        """
        count = len(self.running)
        wanted = self._rounded(max((sample.limit for sample in self.running), default=0))
        for rows in (count + spare, count):
            rows = min(self.max_rows, 1 << max(0, rows - 1).bit_length())
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
            self._forget(sample)
            self.waiting.appendleft(sample)

    def release(self, rows: Iterable[int], keep: Mapping[int, Sequence[int]] | None = None) -> list[tuple[int, int]]:
        """Take ended rows out; returns the moves (from, to) that close the gaps, to be done all at once.

        `keep`: rows among them whose tokens, as far as they are computed, may be of use to others.
        """
        ended, keep = set(rows), keep or {}
        left = len(self.running) - len(ended)
        movers = [row for row in range(left, len(self.running)) if row not in ended]
        holes = sorted(row for row in ended if row < left)
        home = {row: row for row in ended} | dict(zip(holes, movers))
        moves = list(zip(movers, holes)) + [(hole, home[hole]) for hole in holes if hole in keep]
        for row in ended:
            sample = self.running[row]
            self._forget(sample)
            if row in keep:
                self.prefixes.keep(Holder(home[row], keep[row], marks(keep[row]), sample.lasting))
        for source, target in zip(movers, holes):
            sample = self.running[target] = self.running[source]
            self.lengths[target] = self.lengths[source]
            if sample.holder is not None:
                sample.holder.row = target
        del self.running[left:], self.lengths[left:]
        return moves

    def take_waiting(self, wanted: Callable[[Sample], bool]) -> list[Sample]:
        """Samples out of the queue."""
        taken = [sample for sample in self.waiting if wanted(sample)]
        if taken:
            self.waiting = deque(sample for sample in self.waiting if not wanted(sample))
        return taken

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self.running.clear()
        self.lengths.clear()
        self.prefixes.clear()

    def _forget(self, sample: Sample) -> None:
        if sample.holder is not None:
            self.prefixes.drop(sample.holder)
            sample.holder = None

    def _needs(self) -> Iterable[int]:
        return (self._need(sample, length) for sample, length in zip(self.running, self.lengths))

    def _need(self, sample: Sample, length: int) -> int:
        return min(sample.limit, length + self.block)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block
