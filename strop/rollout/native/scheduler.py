"""The scheduler: which samples run in which rows of the KV cache, and which cached prefixes they reuse. No
tensors here.

Samples wait in order of arrival and run in rows 0, 1, 2 ... without gaps: when one finishes, the last row
moves into its place. The cache is a rectangle of rows x capacity tokens with a budget for its area. Samples
are admitted while their tokens and a little headroom fit. If the rectangle then grows too large, the samples
that were admitted last are preempted: they go back to the head of the queue and later compute their tokens
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from strop.rollout.base import Sampling
from strop.rollout.native.kv_cache import CachedPrefix, PrefixCache, block_hashes

_MIN_SECOND_PASS = 64
"""Tokens in common with a row admitted at the same time that are worth a second prefill pass."""


@dataclass(eq=False)
class ScheduledSample:
    """One completion that is waiting or running."""

    request: int
    """Number of the request; its samples have the same prompt."""
    index: int
    prompt: Sequence[int]
    limit: int
    """Limit of tokens, prompt included."""
    settings: Sampling = Sampling()
    stream: int = 0
    """Its random stream."""
    listener: Callable[[list[int], list[float]], None] | None = None
    """Called with new tokens and their log-probs."""
    multi_turn: bool = False
    """It is a turn of a conversation, which may continue."""
    adapter: int = 0
    """The load of a LoRA adapter that samples it, 0: none. Keys and values of different adapters, and of
    different loads of one adapter, are never shared."""
    tokens: list[int] = field(default_factory=list)
    """Sampled tokens when they were last read from the device."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Weights that sampled `tokens`: spans (version, number of tokens)."""
    num_streamed: int = 0
    """Sampled tokens that the listener already has."""
    prefix: CachedPrefix | None = None
    """How other sequences find its row; None if another row with the same tokens is found instead."""
    decode_prefill_len: int = 0
    """Length of a sequence that decode steps prefill (see Admission.decode_prefill), else 0. When it is
    longer, all of these tokens are computed."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(frozen=True)
class Admission:
    """An admitted sample. The part of its sequence that is not cached is computed."""

    sample: ScheduledSample
    row: int
    source_row: int | None = None
    """A row with the same first `num_cached_tokens` tokens; its keys and values are copied."""
    num_cached_tokens: int = 0
    second_pass: bool = False
    """Its source row, or that of the row it duplicates, is admitted at the same time and computed first."""
    duplicate_of: int | None = None
    """A row admitted at the same time with exactly the same tokens; it also shares its logits."""
    decode_prefill: bool = False
    """So few tokens are not cached that decode steps compute them: the steps feed it the next token of its
    sequence instead of sampling one."""


class Scheduler:
    def __init__(
        self,
        *,
        max_num_seqs: int,
        budget: int,
        block: int = 64,
        min_admit_share: float = 0.0,
        max_decode_prefill: int = 0,
    ) -> None:
        """`budget`: area of the cache in tokens. Capacities are multiples of `block`, which is also the
        headroom.

        `min_admit_share`: while more samples wait than rows are free, new samples wait until they are this
        share of all rows, so that few large passes prefill them instead of many small ones.
        `max_decode_prefill`: limit of uncached tokens that decode steps prefill.
        """
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.block = block
        self.min_admit_share = min_admit_share
        self.max_decode_prefill = max_decode_prefill
        self.waiting: deque[ScheduledSample] = deque()
        self.running: list[ScheduledSample] = []
        self.lengths: list[int] = []
        """Tokens of each running row; between two reads of the device, an upper bound."""
        self.prefix_cache = PrefixCache()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def over_budget(self, tokens: int) -> str | None:
        """Why a sequence of so many tokens can never run, or None."""
        if tokens <= self.budget:
            return None
        return (
            f"up to {tokens} tokens are asked for and the cache holds {self.budget}; give it more memory or "
            "ask for less"
        )

    def add(self, samples: Iterable[ScheduledSample]) -> None:
        """Append samples to the queue."""
        self.waiting.extend(samples)

    def admit(self) -> list[ScheduledSample]:
        """Move samples from the head of the queue into free rows, shortest first so that neighbours have
        similar lengths."""
        admitted: list[ScheduledSample] = []
        max_needed = max(self._needed_by_running(), default=0)
        while self.waiting and len(self.running) + len(admitted) < self.max_num_seqs:
            needed = max(max_needed, self._needed(self.waiting[0], self.waiting[0].length))
            if (len(self.running) + len(admitted) + 1) * needed > self.budget:
                break
            max_needed = needed
            admitted.append(self.waiting.popleft())
        too_few = len(admitted) < self.min_admit_share * (len(self.running) + len(admitted))
        if self.running and self.waiting and too_few:
            self.waiting.extendleft(reversed(admitted))
            return []
        admitted.sort(key=lambda sample: sample.length)
        for sample in admitted:
            self.running.append(sample)
            self.lengths.append(sample.length)
        return admitted

    def assign_prefixes(self, first: int, rows: int) -> tuple[list[Admission], list[tuple[int, int]]]:
        """Where the rows from `first` on find cached prefixes, in a cache with so many rows.

        Also the moves (source, target) of finished sequences that are in their way. Moves, and copies of the
        first pass, are to be done all at once: both name rows as they are now.
        """
        siblings = {}
        for row, sample in enumerate(self.running[:first]):
            if not sample.decode_prefill_len:
                siblings[sample.request] = row
        first_with: dict[tuple[int, tuple[int, ...]], Admission] = {}
        admitted_now = PrefixCache()
        admissions = []
        for row in range(first, len(self.running)):
            sample = self.running[row]
            sequence = tuple(sample.sequence)
            key = (sample.adapter, sequence)
            if key in first_with:
                same = first_with[key]
                admissions.append(Admission(sample, row, second_pass=same.second_pass, duplicate_of=same.row))
                continue
            prefix = _prefix(sample, row, sequence)
            admission = self._find_source(sample, prefix, siblings.get(sample.request), admitted_now)
            admissions.append(admission)
            if admission.decode_prefill:
                sample.decode_prefill_len = len(sequence)
                # Other sequences cannot copy what decode steps have not computed yet.
                computed = sequence[: admission.num_cached_tokens]
                prefix = _prefix(sample, row, computed)
            else:
                sample.decode_prefill_len = 0
                first_with[key] = admission
            sample.prefix = prefix
            if not admission.second_pass:
                admitted_now.add(prefix)
        for admission in admissions:
            if admission.sample.prefix is not None:
                self.prefix_cache.add(admission.sample.prefix)
        return admissions, self.prefix_cache.make_room(first, len(self.running), rows)

    def _find_source(
        self, sample: ScheduledSample, prefix: CachedPrefix, sibling: int | None, admitted_now: PrefixCache
    ) -> Admission:
        """The row with the longest common prefix: a running sample of the same request, another row, or a row
        admitted at the same time."""
        source = sibling
        num_cached = 0
        second_pass = False
        if sibling is not None:
            num_cached = len(sample.prompt)
        match = self.prefix_cache.find(prefix.tokens, prefix.hashes, prefix.adapter)
        if match is not None and match.num_tokens > num_cached:
            source = match.prefix.row
            num_cached = match.num_tokens
            if num_cached == len(match.prefix.tokens):
                self.prefix_cache.superseded.append(match.prefix)  # the new row holds the same and more
        match = admitted_now.find(prefix.tokens, prefix.hashes, prefix.adapter)
        if match is not None and match.num_tokens >= num_cached + _MIN_SECOND_PASS:
            source = match.prefix.row
            num_cached = match.num_tokens
            second_pass = True
        # The last token is always computed: its logits are needed.
        num_cached = min(num_cached, len(prefix.tokens) - 1)
        num_uncached = len(prefix.tokens) - num_cached
        decode_prefill = num_cached > 0 and 0 < num_uncached <= self.max_decode_prefill
        return Admission(sample, prefix.row, source, num_cached, second_pass, decode_prefill=decode_prefill)

    def cache_shape(self, spare: int = 0) -> tuple[int, int]:
        """Rows and capacity that the cache should have: all rows up to their limit and some more rows, if the
        budget allows.

        `spare`: rows to keep finished conversations in, if there is memory for them too.
        """
        count = len(self.running)
        capacity = self._rounded(max((sample.limit for sample in self.running), default=0))
        for rows in (count + spare, count):
            rows = min(self.max_num_seqs, 1 << max(0, rows - 1).bit_length())
            if rows * capacity <= self.budget:
                return rows, capacity
        return count, min(capacity, self.budget // max(1, count))

    def select_preempted(self) -> list[tuple[int, ScheduledSample]]:
        """Rows, from the last, that must be preempted so that the other rows fit; the caller passes them to
        `preempt`."""
        rows = len(self.running)
        needed = list(self._needed_by_running())
        while rows > 1 and rows * max(needed[:rows]) > self.budget:
            rows -= 1
        return [(row, self.running[row]) for row in range(len(self.running) - 1, rows - 1, -1)]

    def preempt(self, preempted: Sequence[tuple[int, ScheduledSample]]) -> None:
        """Put the last rows back to the head of the queue, in their old order."""
        for row, sample in preempted:
            assert row == len(self.running) - 1
            self.running.pop()
            self.lengths.pop()
            self._remove_prefix(sample)
            self.waiting.appendleft(sample)

    def remove_finished(
        self, rows: Iterable[int], reusable: Mapping[int, Sequence[int]] | None = None
    ) -> list[tuple[int, int]]:
        """Take finished rows out. Returns the moves (source, target) that close the gaps, to be done all at
        once.

        `reusable`: rows among them whose tokens, as far as they are computed, other sequences may reuse.
        """
        finished = set(rows)
        reusable = reusable or {}
        left = len(self.running) - len(finished)
        movers = [row for row in range(left, len(self.running)) if row not in finished]
        gaps = sorted(row for row in finished if row < left)
        new_row = {row: row for row in finished}  # the row that a finished sequence goes to
        new_row.update(zip(gaps, movers))
        moves = list(zip(movers, gaps))
        moves += [(gap, new_row[gap]) for gap in gaps if gap in reusable]
        for row in finished:
            sample = self.running[row]
            self._remove_prefix(sample)
            if row in reusable:
                self.prefix_cache.add_finished(_prefix(sample, new_row[row], reusable[row]))
        for source, target in zip(movers, gaps):
            sample = self.running[source]
            self.running[target] = sample
            self.lengths[target] = self.lengths[source]
            if sample.prefix is not None:
                sample.prefix.row = target
        del self.running[left:]
        del self.lengths[left:]
        return moves

    def take_waiting(self, is_wanted: Callable[[ScheduledSample], bool]) -> list[ScheduledSample]:
        """Remove samples from the queue and return them."""
        taken: list[ScheduledSample] = []
        kept: list[ScheduledSample] = []
        for sample in self.waiting:
            if is_wanted(sample):
                taken.append(sample)
            else:
                kept.append(sample)
        if taken:
            self.waiting = deque(kept)
        return taken

    def clear(self) -> None:
        """Drop everything."""
        self.waiting.clear()
        self.running.clear()
        self.lengths.clear()
        self.prefix_cache.clear()

    def _remove_prefix(self, sample: ScheduledSample) -> None:
        if sample.prefix is not None:
            self.prefix_cache.remove(sample.prefix)
            sample.prefix = None

    def _needed_by_running(self) -> Iterable[int]:
        return (self._needed(sample, length) for sample, length in zip(self.running, self.lengths))

    def _needed(self, sample: ScheduledSample, length: int) -> int:
        """Tokens of the cache that the sample needs soon."""
        return min(sample.limit, length + self.block)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block


def _prefix(sample: ScheduledSample, row: int, tokens: Sequence[int]) -> CachedPrefix:
    hashes = block_hashes(tokens, sample.adapter)
    return CachedPrefix(row, tokens, hashes, sample.multi_turn, adapter=sample.adapter)
