"""The step loop: all sequences in the engine, and one step for all of them.

A step is schedule, run, postprocess: admit waiting samples and prefill what is not cached, decode one or more
tokens for all running rows, return the finished samples and close the gaps they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import Completion, merge_spans, newest_version
from strop.rollout.native.decode_rows import ERROR, RUNNING, finish_name
from strop.rollout.native.meter import CacheUse, Meter
from strop.rollout.native.pages import PAGE, SPARE, PagedKVCache
from strop.rollout.native.requests import Admission, ScheduledSample
from strop.rollout.native.runner import Runner
from strop.rollout.native.scheduler import Scheduler
from strop.rollout.native.speculation.speculator import build_speculator

_ERRORS = {"error": "the model's logits are not numbers (NaN or infinity)"}
STEPS_PER_SYNC = {"cpu": 1, "cuda": 16}
"""Decode steps between two reads of the rows' states from the device."""
MIN_ADMIT_SHARE = {"cpu": 0.0, "cuda": 1 / 8}
"""See Scheduler. On a GPU a prefill pass costs the host time of several decode steps, however few its tokens;
a CPU computes what there is."""
_MAX_DECODE_PREFILL = {"cpu": 0, "cuda": 64}
"""See Scheduler. For the same reason the few new tokens of a conversation's next turn join decode steps."""
_MIN_BATCH_TOKENS = 64
_UNLIMITED = 1 << 62
HEADROOM = 256
"""See Scheduler: free pages for so many more tokens of each row before another is admitted."""

OnFinished = Callable[[ScheduledSample, Completion], None]


class StepLoop:
    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        prefix_caching: bool,
        on_finished: OnFinished,
        before_step: Callable[[int, int], None],
        meter: Meter,
        speculation: SpeculationConfig,
    ) -> None:
        """`prefix_caching`: finished sequences stay in free rows. `before_step` gets the rows of
        each step, and the most tokens that one of them may still have."""
        self.runner = runner
        self._pages = runner.cache if isinstance(runner.cache, PagedKVCache) else None
        self.version = 0
        kind = runner.device.type
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            budget=0,
            headroom=HEADROOM,
            min_admit_share=MIN_ADMIT_SHARE.get(kind, 0.0),
            max_decode_prefill=_MAX_DECODE_PREFILL.get(kind, 0),
            copies_prefixes=not runner.cache.has_states,
        )
        self._prefix_caching = prefix_caching
        if prefix_caching and runner.cache.has_states:
            self.scheduler.use_snapshots(runner.keep_states())
        self._on_finished = on_finished
        self._before_step = before_step
        self._meter = meter
        self._speculator = build_speculator(speculation, runner, meter)
        self._num_filled = 0
        """Rows whose tokens are on the device."""
        self._requested_area = 0
        """Tokens of the cache when it last had to grow."""
        self._max_budget: int | None = None
        """A larger cache ran out of memory."""

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def set_budget(self, tokens: int) -> None:
        """The cache may hold so many tokens."""
        if self._max_budget is not None:
            tokens = min(tokens, self._max_budget)
        if self._pages is not None:
            tokens = max(0, tokens // PAGE - SPARE) * PAGE
        self.scheduler.budget = tokens

    def step(self) -> None:
        """Admit, decode and return finished samples; after an OOM, shrink the cache and continue."""
        try:
            self._admit()
            self._decode()
            self._return_finished()
        except torch.OutOfMemoryError:
            self._shrink_after_oom()

    def abort(self, is_aborted: Callable[[ScheduledSample], bool]) -> None:
        """Finish samples now, with the tokens they have."""
        rows = [row for row, sample in enumerate(self.scheduler.running) if is_aborted(sample)]
        if rows:
            self._finish(rows, ["abort"] * len(rows))
        for sample in self.scheduler.take_waiting(is_aborted):
            self._complete(sample, "abort")

    def recompute_all(self) -> None:
        """The cache is outdated: all samples go back to the queue and keep their sampled tokens."""
        self._preempt_from(0)
        self.scheduler.prefix_cache.clear()
        self._release_unused()

    def forget_finished(self) -> None:
        """Drop the cached prefixes of finished sequences."""
        self.scheduler.prefix_cache.remove_finished()
        self._release_unused()

    def free(self) -> None:
        """Free the cache."""
        self.scheduler.prefix_cache.clear()
        self.runner.free()

    def clear(self) -> None:
        """Drop everything, also after a failure in the middle of a step."""
        self.scheduler.clear()
        self._num_filled = 0
        self.runner.free()

    # --- admission and prefill ------------------------------------------------------------------------------

    def _admit(self) -> None:
        scheduler = self.scheduler
        first = len(scheduler.running)
        if not scheduler.may_admit() or not scheduler.admit(self._num_free_pages()):
            return
        self._fit_cache()
        admissions = self._place(first)
        if not admissions:
            return
        first_pass = [admission for admission in admissions if not admission.second_pass]
        second_pass = [admission for admission in admissions if admission.second_pass]
        runner = self.runner
        with self._meter.prefill(runner.device):
            computed = runner.prefill(first_pass)
            if second_pass:
                runner.cache.share([one.placement for one in second_pass if one.duplicate_of is None])
                computed += runner.prefill(second_pass)
        self._count_admitted(admissions, computed)
        self._num_filled = len(scheduler.running)
        for admission in admissions:
            scheduler.lengths[admission.row] += 1
        self._return_finished()

    def _num_free_pages(self) -> int | None:
        """Pages that no running row has, those not allocated yet included."""
        if self._pages is None:
            return None
        pool = self._pages.pool
        used = pool.num_used - pool.num_only(self.scheduler.prefix_cache.finished)
        return self.scheduler.budget // PAGE - used

    def _place(self, first: int) -> list[Admission]:
        """Give the rows from `first` on their memory, with the prefixes that are cached. Rows for which there
        is none wait again."""
        scheduler = self.scheduler
        cache = self.runner.cache
        slots = cache.rows if self._pages is None else _UNLIMITED
        admissions, moves = scheduler.assign_prefixes(first, slots)
        moved_length = 0
        if moves:
            moved_length = max(len(prefix.tokens) for prefix in scheduler.prefix_cache.finished.values())
        placements = [admission.placement for admission in admissions]
        placed = cache.place(placements, moves, moved_length, scheduler.prefix_cache.evict)
        scheduler.take_back(admissions[placed:])
        self._release_unused()
        # Pages of finished sequences need no row.
        self.runner.rows.move(moves if self._pages is None else [], len(scheduler.running))
        return admissions[:placed]

    def _count_admitted(self, admissions: Sequence[Admission], computed: int) -> None:
        self._meter.admitted(computed, sum(admission.sample.length for admission in admissions))
        for admission in admissions:
            sample = admission.sample
            if admission.snapshot is not None:
                self._meter.continued_tokens += admission.num_cached_tokens
            if sample.preempted and admission.duplicate_of is None:
                self._meter.recomputed_tokens += sample.length - admission.num_cached_tokens
            sample.preempted = False

    def _release_unused(self) -> None:
        """Memory of sequences that neither run nor are kept is free."""
        self.runner.cache.keep(len(self.scheduler.running), self.scheduler.prefix_cache.finished)

    def _fit_cache(self) -> None:
        """Make the cache large enough for the running rows, and for finished conversations if there is
        memory."""
        cache = self.runner.cache
        scheduler = self.scheduler
        num_stops = max(1, *(len(sample.settings.stop_ids) for sample in scheduler.running))
        if self._pages is not None:
            self._fit_pages(self._pages, num_stops)
            return
        rows = len(scheduler.running)
        capacity = max(scheduler.lengths) + 1
        spare = scheduler.prefix_cache.num_multi_turn
        crowded = spare and rows + spare > cache.rows and scheduler.cache_shape(spare)[0] > cache.rows
        if rows > cache.rows or capacity > cache.capacity or crowded:
            rows, capacity = scheduler.cache_shape(spare)
            # Do not shrink the other dimension if memory allows: batches of different shapes (training,
            # validation) would else alternate in allocating the cache and recording CUDA graphs.
            kept_rows = max(rows, cache.rows)
            kept_capacity = max(capacity, cache.capacity)
            if kept_rows * kept_capacity <= scheduler.budget:
                rows = kept_rows
                capacity = kept_capacity
            self._requested_area = rows * capacity
        else:
            rows = cache.rows
        held_rows = max(self._num_filled, max(scheduler.prefix_cache.finished, default=-1) + 1)
        self.runner.fit(rows, capacity, min(held_rows, rows), num_stops)
        scheduler.prefix_cache.fit(cache.rows, cache.capacity)

    def _fit_pages(self, cache: PagedKVCache, num_stops: int) -> None:
        """All that is known can run up to its limit, if the budget allows."""
        scheduler = self.scheduler
        pages = min(scheduler.wanted_pages(), scheduler.budget // PAGE) + SPARE
        if pages > cache.pool.size:
            # Pages that are added little by little would be copied each time.
            pages = min(max(pages, cache.pool.size * 5 // 4), scheduler.budget // PAGE + SPARE)
            self._requested_area = pages * PAGE
        rows, capacity = scheduler.table_shape()
        self.runner.fit_pages(rows, capacity, pages, self._num_filled, num_stops)

    # --- decode ---------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        runner = self.runner
        scheduler = self.scheduler
        if not scheduler.running:
            return
        if self._pages is None and max(scheduler.lengths) >= runner.cache.capacity:
            preempted = scheduler.select_preempted()
            self._meter.preemptions += len(preempted)
            self._preempt_from(len(scheduler.running) - len(preempted))
            self._fit_cache()
        left = max(sample.limit - length for sample, length in zip(scheduler.running, scheduler.lengths))
        steps = STEPS_PER_SYNC.get(runner.device.type, 1)
        drafts = 0
        if self._speculator is not None:
            drafts = self._speculator.num_drafts(scheduler.running)
            steps = self._speculator.num_passes(drafts, steps)
        room = runner.cache.capacity - max(scheduler.lengths)
        steps = max(1, min(steps, left, room // (drafts + 1)))
        if self._pages is not None:
            self._reserve(self._pages, steps * (drafts + 1))
        lengths = scheduler.lengths
        count = len(scheduler.running)
        recorded = runner.num_recorded
        self._before_step(count, left)
        with self._meter.decode(runner.device, count, waiting=bool(scheduler.waiting)):
            runner.decode(scheduler.running, lengths, steps, drafts)
        if self._speculator is not None:
            seconds = self._meter.last_decode_seconds if runner.num_recorded == recorded else None
            self._speculator.measured(count, drafts, steps, seconds)
        for row, sample in enumerate(scheduler.running):
            lengths[row] = min(sample.limit, lengths[row] + steps * (drafts + 1))
        pages = 0
        if self._pages is not None:
            pages = self._pages.pool.num_used
        self._meter.decoded(steps, count, CacheUse(sum(lengths), scheduler.budget, pages))

    def _reserve(self, cache: PagedKVCache, steps: int) -> None:
        """Pages for the next steps of all rows. If there are none left, rows are preempted, newest first."""
        scheduler = self.scheduler

        def lengths() -> list[int]:
            rows = zip(scheduler.running, scheduler.lengths)
            return [min(sample.limit, length + steps) for sample, length in rows]

        while not cache.reserve(lengths(), scheduler.prefix_cache.evict):
            assert len(scheduler.running) > 1
            self._meter.preemptions += 1
            row = scheduler.newest()
            self._read_tokens([row])
            self._close_gaps(scheduler.send_back(row), 0)

    # --- preemption -----------------------------------------------------------------------------------------

    def _preempt_from(self, first: int) -> None:
        """All rows from `first` on go back to the head of the queue with the tokens they have."""
        running = self.scheduler.running
        if first >= len(running):
            return
        self._read_tokens(range(first, min(len(running), self._num_filled)))
        self.scheduler.preempt([(row, running[row]) for row in range(len(running) - 1, first - 1, -1)])
        self._num_filled = min(self._num_filled, first)
        self._release_unused()
        self.runner.rows.move([], first)

    def _shrink_after_oom(self) -> None:
        """The device had less memory than measured: free the cache and continue with a smaller one.

        Nothing is lost: tokens are kept, and a sampled token depends only on its stream and position.
        """
        runner = self.runner
        scheduler = self.scheduler
        self._meter.out_of_memory += 1
        states, scheduler.lengths[: self._num_filled] = runner.rows.states_and_lengths(self._num_filled)
        # Of several decode steps, those before the failure may have ended rows.
        ended = {one: finish_name(state) for one, state in zip(scheduler.running, states) if state != RUNNING}
        self._preempt_from(0)
        for sample in scheduler.take_waiting(ended.__contains__):
            self._complete(sample, ended[sample], _ERRORS.get(ended[sample]))
        self._max_budget = max(runner.cache.tokens, min(self._requested_area, scheduler.budget)) * 3 // 4
        self.set_budget(self._max_budget)
        self.free()
        runner.batch_tokens = max(_MIN_BATCH_TOKENS, runner.batch_tokens // 2)
        torch.cuda.empty_cache()
        for sample in scheduler.take_waiting(lambda sample: sample.limit > scheduler.budget):
            reason = scheduler.over_budget(sample.limit)
            self._complete(sample, "error", f"out of memory on {runner.device}: {reason}")

    # --- finished samples -----------------------------------------------------------------------------------

    def _return_finished(self) -> None:
        """Stream new tokens, return finished samples and close the gaps they leave."""
        scheduler = self.scheduler
        states, lengths = self.runner.rows.states_and_lengths(len(scheduler.running))
        scheduler.lengths[:] = lengths
        self._stream([row for row, sample in enumerate(scheduler.running) if sample.listener is not None])
        finished = [row for row, state in enumerate(states) if state != RUNNING]
        failed = [row for row in finished if states[row] == ERROR]
        if failed:  # a later sequence in the same row must not read NaN
            self.runner.cache.clear(failed)
        if finished:
            self._finish(finished, [finish_name(states[row]) for row in finished])

    def _stream(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        self._read_tokens(rows, stay=True)
        for row in rows:
            self.scheduler.running[row].stream_new_tokens()

    def _finish(self, rows: Sequence[int], finishes: Sequence[str]) -> None:
        """Return these rows' samples and close the gaps. Their cached keys and values stay if other sequences
        may reuse them."""
        scheduler = self.scheduler
        self._read_tokens(rows)
        samples = [scheduler.running[row] for row in rows]
        reusable: dict[int, tuple[int, ...]] = {}
        if self._prefix_caching:
            for row, sample, finish in zip(rows, samples, finishes):
                # The newest token was never an input of the model. A row that was aborted during its decode
                # prefill has more uncomputed tokens.
                if finish != "error" and sample.length > sample.decode_prefill_len:
                    reusable[row] = tuple(sample.prefix_keys[:-1])
            if self.runner.kept is not None:
                self.runner.kept.keep((row, scheduler.running[row]) for row in reusable)
        used = max(scheduler.lengths)
        self._close_gaps(scheduler.remove_finished(rows, reusable), used)
        for sample, finish in zip(samples, finishes):
            self._complete(sample, finish, _ERRORS.get(finish))

    def _close_gaps(self, moves: Sequence[tuple[int, int]], used: int) -> None:
        """Rows of up to `used` tokens move; those behind the running ones are free."""
        count = len(self.scheduler.running)
        self.runner.cache.move(moves, used)
        self._release_unused()
        self.runner.rows.move(moves, count)
        self._num_filled = count

    def _complete(self, sample: ScheduledSample, finish: str, error: str | None = None) -> None:
        sample.stream_new_tokens()
        self._meter.tokens += len(sample.tokens)
        if self._speculator is not None and error is None:
            self._speculator.remember(sample)
        versions = sample.versions if len(sample.versions) > 1 else []
        version = newest_version(sample.versions, self.version)
        completion = Completion(sample.tokens, sample.log_probs, finish, version, error, versions)
        completion.adapter_version = sample.adapter
        completion.experts = sample.experts
        self._on_finished(sample, completion)

    def _read_tokens(self, rows: Iterable[int], *, stay: bool = False) -> None:
        """Copy the sampled tokens of these rows to the host, and the experts of rows that do not `stay`."""
        samples = []
        places = []
        for row in rows:
            sample = self.scheduler.running[row]
            samples.append(sample)
            places.append((row, len(sample.prompt), self.scheduler.lengths[row]))
        for sample, (tokens, log_probs) in zip(samples, self.runner.rows.read(places)):
            new = len(tokens) - len(sample.tokens)
            sample.versions = merge_spans([*sample.versions, (self.version, new)])
            sample.tokens, sample.packed = tokens.tolist(), tokens
            sample.log_probs = log_probs
        if self.runner.experts is not None and not stay:
            self.runner.experts.read(self.runner.cache, samples, [(row, end) for row, _, end in places])
