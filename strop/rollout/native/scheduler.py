"""The scheduler: which samples run in which rows of the KV cache, and which cached prefixes they reuse. No
tensors here.

Samples wait in order of arrival and run in rows 0, 1, 2 ... without gaps: when one finishes, the last row
moves into its place. The cache has a budget of tokens. Samples are admitted while the tokens of all rows and
a little headroom fit: in a cache of pages the sum of the rows, without pages a rectangle as wide as the
longest row. If the rows then grow too long, the samples that were admitted last are preempted: they go back
to the head of the queue and later compute their tokens again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from strop.rollout.native.kv_cache import PrefixCache
from strop.rollout.native.pages import PAGE, pages_for
from strop.rollout.native.prefixes.snapshots import StateSnapshots, find_continuation
from strop.rollout.native.requests import BLOCK, Admission, CachedPrefix, ScheduledSample

_MIN_SECOND_PASS = 64
"""Tokens in common with a row admitted at the same time that are worth a second prefill pass."""


class Scheduler:
    def __init__(
        self,
        *,
        max_num_seqs: int,
        budget: int,
        block: int = 64,
        headroom: int = 64,
        min_admit_share: float = 0.0,
        max_decode_prefill: int = 0,
        copies_prefixes: bool = True,
    ) -> None:
        """`budget`: tokens that the cache may hold. Capacities are multiples of `block`, which is also the
        headroom of a row; with pages that is `headroom`.

        `min_admit_share`: while more samples wait than rows are free, new samples wait until they are this
        share of all rows, so that few large passes prefill them instead of many small ones.
        `max_decode_prefill`: limit of uncached tokens that decode steps prefill. `copies_prefixes`: a
        sequence may begin with any part of another; else only where states are kept.
        """
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.block = block
        self.headroom = headroom
        self.min_admit_share = min_admit_share
        self.max_decode_prefill = max_decode_prefill
        self.copies_prefixes = copies_prefixes
        self.waiting: deque[ScheduledSample] = deque()
        self.running: list[ScheduledSample] = []
        self.lengths: list[int] = []
        """Tokens of each running row; between two reads of the device, an upper bound."""
        self.prefix_cache = PrefixCache()
        self.snapshots: StateSnapshots | None = None
        """Where a model with states can continue."""
        self._num_admitted = 0

    def use_snapshots(self, snapshots: StateSnapshots) -> None:
        """States are kept in them; they are outdated when the prefix cache is."""
        self.snapshots = snapshots
        self.prefix_cache.on_clear = snapshots.clear

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

    def may_admit(self) -> bool:
        """Whether samples wait, and so many rows are free that `admit` may admit some."""
        free = self.max_num_seqs - len(self.running)
        if not self.waiting or free <= 0:
            return False
        gather = self.running and len(self.waiting) > free
        return not gather or free >= self.min_admit_share * self.max_num_seqs

    def admit(self, free_pages: int | None = None) -> list[ScheduledSample]:
        """Move samples from the head of the queue into free rows, shortest first so that neighbours have
        similar lengths. `free_pages`: pages that no running row has; None for a cache without pages."""
        admitted: list[ScheduledSample] = []
        fits = self._fits_rectangle() if free_pages is None else self._fits_pages(free_pages)
        while self.waiting and len(self.running) + len(admitted) < self.max_num_seqs:
            if not fits(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
        too_few = len(admitted) < self.min_admit_share * (len(self.running) + len(admitted))
        if self.running and self.waiting and too_few:
            self.waiting.extendleft(reversed(admitted))
            return []
        admitted.sort(key=lambda sample: sample.length)
        for sample in admitted:
            if sample.order is None:
                sample.order = self._num_admitted
                self._num_admitted += 1
            self.running.append(sample)
            self.lengths.append(sample.length)
        return admitted

    def _fits_rectangle(self) -> Callable[[ScheduledSample], bool]:
        """Whether one more sample fits: asked for one after the other, those that fit are admitted."""
        rows = len(self.running)
        widest = max((self._needed(*row) for row in zip(self.running, self.lengths)), default=0)

        def fits(sample: ScheduledSample) -> bool:
            nonlocal rows, widest
            needed = max(widest, self._needed(sample, sample.length))
            if (rows + 1) * needed > self.budget:
                return False
            rows += 1
            widest = needed
            return True

        return fits

    def _fits_pages(self, free: int) -> Callable[[ScheduledSample], bool]:
        """The same for a cache with so many free pages. Running rows will need more pages soon. Samples of a
        request share the full pages of its prompt."""
        requests = set()
        for sample, length in zip(self.running, self.lengths):
            free -= pages_for(min(sample.limit, length + self.headroom)) - pages_for(length)
            if not sample.decode_prefill_len:
                requests.add(sample.request)
        empty = not self.running

        def fits(sample: ScheduledSample) -> bool:
            nonlocal free, empty
            needed = pages_for(min(sample.limit, sample.length + self.headroom))
            if sample.request in requests:
                needed -= len(sample.prompt) // PAGE
            if needed > free and not empty:
                return False
            free -= needed
            empty = False
            requests.add(sample.request)
            return True

        return fits

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
            sequence = tuple(sample.prefix_keys)
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
        if not self.copies_prefixes:
            return self._find_snapshot(sample, prefix)
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
        decode_prefill = self._in_decode_steps(sample, len(prefix.tokens), num_cached)
        return Admission(sample, prefix.row, source, num_cached, second_pass, decode_prefill=decode_prefill)

    def _in_decode_steps(self, sample: ScheduledSample, length: int, num_cached: int) -> bool:
        """Whether decode steps compute what is not cached of a sequence."""
        return max(0, sample.image_end - 1) < num_cached and length - num_cached <= self.max_decode_prefill

    def _find_snapshot(self, sample: ScheduledSample, prefix: CachedPrefix) -> Admission:
        """For a model with states: a row with the keys and values of a beginning after which its states are
        kept."""
        length = len(prefix.tokens)
        # Only conversations and further samples of the same prompt, which are next, come back to it.
        more = bool(self.waiting) and self.waiting[0].request == sample.request
        keeps = False
        found = None
        if self.snapshots is not None:
            keeps = self.snapshots.max_slots > 0 and length > BLOCK and (sample.multi_turn or more)
            found = find_continuation(
                self.snapshots, self.prefix_cache, prefix.tokens, prefix.hashes, prefix.adapter
            )
        if found is None:
            return Admission(sample, prefix.row, keeps_states=keeps)
        match, slot = found
        num_cached = match.num_tokens
        if num_cached == len(match.prefix.tokens):
            self.prefix_cache.superseded.append(match.prefix)  # the new row holds the same and more
        decode_prefill = self._in_decode_steps(sample, length, num_cached)
        return Admission(
            sample,
            prefix.row,
            match.prefix.row,
            num_cached,
            decode_prefill=decode_prefill,
            snapshot=slot,
            keeps_states=keeps and not decode_prefill,
        )

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

    def table_shape(self) -> tuple[int, int]:
        """Rows and tokens of a row that a cache of pages should be able to have."""
        rows = 1 << max(0, len(self.running) - 1).bit_length()
        return min(self.max_num_seqs, rows), self._rounded(max(sample.limit for sample in self.running))

    def wanted_pages(self) -> int:
        """Pages in which everything known could run up to its limit, and finished conversations stay."""
        waiting = islice(self.waiting, self.max_num_seqs - len(self.running))
        finished = self.prefix_cache.finished.values()
        return (
            sum(pages_for(sample.limit) for sample in self.running)
            + sum(pages_for(sample.limit) for sample in waiting)
            + sum(pages_for(len(prefix.tokens)) for prefix in finished if prefix.multi_turn)
        )

    def newest(self) -> int:
        """The row that was first admitted last."""
        orders = [sample.order or 0 for sample in self.running]
        return orders.index(max(orders))

    def send_back(self, row: int) -> list[tuple[int, int]]:
        """Preempt one row. Returns the moves that close the gap."""
        sample = self.running[row]
        moves = self.remove_finished([row])
        sample.preempted = True
        self.waiting.appendleft(sample)
        return moves

    def take_back(self, admissions: Sequence[Admission]) -> None:
        """The last admissions are not possible yet: their samples wait again."""
        for admission in reversed(admissions):
            assert self.running.pop() is admission.sample
            self.lengths.pop()
            self._remove_prefix(admission.sample)
            self.waiting.appendleft(admission.sample)

    def select_preempted(self) -> list[tuple[int, ScheduledSample]]:
        """Rows, from the last, that must be preempted so that the other rows fit; the caller passes them to
        `preempt`."""
        rows = len(self.running)
        needed = [self._needed(*row) for row in zip(self.running, self.lengths)]
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
            sample.preempted = True
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

    def _needed(self, sample: ScheduledSample, length: int) -> int:
        """Tokens of the cache that the sample needs soon."""
        return min(sample.limit, length + self.block)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block


def _prefix(sample: ScheduledSample, row: int, tokens: Sequence[int]) -> CachedPrefix:
    return CachedPrefix(row, tokens, sample.multi_turn, adapter=sample.adapter)
