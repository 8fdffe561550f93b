"""Everything in flight, and one step for all of it.

A step is schedule, run, postprocess: seat waiting samples and compute what their sequences lack, sample tokens for all running
rows, hand out those that ended and close the gaps they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from strop.rollout.base import Completion
from strop.rollout.native.meter import Meter
from strop.rollout.native.rows import ERROR, RUNNING, finish_name
from strop.rollout.native.runner import Runner
from strop.rollout.native.scheduler import Admission, Sample, Scheduler
from strop.rollout.partial import merged

_NOT_NUMBERS = "the model's logits are not numbers (NaN or infinity)"
_STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 16}
_GATHER = {"cpu": 0.0, "cuda": 1 / 8}
"""A pass over prompts costs a GPU the host time of several decode steps, however few they are; a CPU computes what there is."""
_FEED = {"cpu": 0, "cuda": 64}
"""For the same reason the few tokens of a conversation's next turn ride along with decode steps."""
_SMALLEST_PREFILL = 64

Give = Callable[[Sample, Completion], None]
"""What becomes of a completion."""


class Batch:
    def __init__(self, runner: Runner, *, max_rows: int, keep: bool, give: Give, meter: Meter) -> None:
        """`keep`: ended sequences stay in free rows for others that start like them."""
        self.runner, self.version = runner, 0
        self.after_step: Callable[[int], None] = lambda rows: None
        """Told how many rows each decode step had."""
        kind = runner.device.type
        self.scheduler = Scheduler(max_rows=max_rows, budget=0, gather=_GATHER.get(kind, 0.0), feed=_FEED.get(kind, 0))
        self._keep, self._give, self._meter = keep, give, meter
        self._filled = 0
        """Rows whose tokens are on the device."""
        self._asked = 0
        """Area of the cache when it was last to grow."""
        self._ceiling: int | None = None
        """No larger cache than this was found possible."""

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def budget(self, tokens: int) -> None:
        """The cache may hold so many tokens."""
        self.scheduler.budget = tokens if self._ceiling is None else min(tokens, self._ceiling)

    def step(self) -> None:
        try:
            self._admit()
            self._decode()
            self._hand_out()
        except torch.OutOfMemoryError:
            self._retreat()

    def drop(self, unwanted: Callable[[Sample], bool]) -> None:
        """End samples now, with what they have."""
        rows = [row for row, sample in enumerate(self.scheduler.running) if unwanted(sample)]
        if rows:
            self._deliver(rows, ["abort"] * len(rows))
        for sample in self.scheduler.take_waiting(unwanted):
            self._hand(sample, "abort")

    def start_over(self) -> None:
        """What the cache holds is of no use any more: everybody goes back to the queue, and keeps the tokens sampled so far."""
        self._send_back(0)
        self.scheduler.prefixes.clear()

    def forget(self) -> None:
        """Keep nothing of what ended."""
        self.scheduler.prefixes.leave()

    def free(self) -> None:
        self.scheduler.prefixes.clear()
        self.runner.free()

    def clear(self) -> None:
        """Forget everything, also after a failure in the middle."""
        self.scheduler.clear()
        self._filled = 0
        self.runner.free()

    # --- seating ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        runner, scheduler = self.runner, self.scheduler
        first = len(scheduler.running)
        seated = scheduler.seat()
        if not seated:
            return
        self._fit()
        admissions, moves = scheduler.share(first, runner.cache.rows)
        held = [len(holder.tokens) for holder in scheduler.prefixes.kept.values()] if moves else [0]
        early, late = [a for a in admissions if not a.later], [a for a in admissions if a.later]
        with self._meter.prefill(runner.device):
            self._copy(early, moves, max(held))
            runner.rows.move(moves, len(scheduler.running))
            computed = runner.prefill(early, [a.sample.stream for a in early])
            if late:
                self._copy(late, [], 0)
                computed += runner.prefill(late, [a.sample.stream for a in late])
        self._meter.seated(computed, sum(sample.length for sample in seated))
        self._filled = len(scheduler.running)
        for admission in admissions:
            scheduler.lengths[admission.row] += 1
        self._lend()
        self._hand_out()

    def _copy(self, admissions: Sequence[Admission], moves: Sequence[tuple[int, int]], longest: int) -> None:
        """What admissions share with their donors, together with these moves of up to `longest` tokens."""
        copies = [*moves, *((a.donor, a.row) for a in admissions if a.donor is not None and a.donor != a.row)]
        self.runner.cache.copy(*_sides(copies), max([longest, *(a.shared for a in admissions)]))

    def _lend(self) -> None:
        if self.runner.lends:
            self.runner.rows.lend(self.scheduler.running)

    def _fit(self) -> None:
        """The cache large enough for the running rows, and for ended conversations where there is memory."""
        cache, scheduler = self.runner.cache, self.scheduler
        stops = max(len(sample.settings.stop_ids) for sample in scheduler.running)
        rows, capacity = len(scheduler.running), max(scheduler.lengths) + 1
        spare = scheduler.prefixes.lasting
        crowded = spare and rows + spare > cache.rows and scheduler.shape(spare)[0] > cache.rows
        if rows > cache.rows or capacity > cache.capacity or crowded:
            rows, capacity = scheduler.shape(spare)
            # Keep the size of the other direction where memory allows: batches of different shapes (training, validation) would
            # else take turns in making the cache anew, and recorded steps with it.
            kept_rows, kept_capacity = max(rows, cache.rows), max(capacity, cache.capacity)
            if kept_rows * kept_capacity <= scheduler.budget:
                rows, capacity = kept_rows, kept_capacity
            self._asked = rows * capacity
        else:
            rows = cache.rows
        held = max(self._filled, max(scheduler.prefixes.kept, default=-1) + 1)
        self.runner.fit(rows, capacity, min(held, rows), max(1, stops))
        scheduler.prefixes.within(cache.rows, cache.capacity)

    # --- running ---------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        runner, scheduler = self.runner, self.scheduler
        if not scheduler.running:
            return
        if max(scheduler.lengths) >= runner.cache.capacity:
            evicted = scheduler.make_room()
            self._meter.preemptions += len(evicted)
            self._send_back(len(scheduler.running) - len(evicted))
            self._fit()
        count, lengths = len(scheduler.running), scheduler.lengths
        left = max(sample.limit - length for sample, length in zip(scheduler.running, lengths))
        steps = max(1, min(_STEPS_BETWEEN_LOOKS.get(runner.device.type, 1), left, runner.cache.capacity - max(lengths)))
        with self._meter.decode(runner.device):
            runner.decode(scheduler.running, lengths, steps)
        self.after_step(count)
        for row in range(count):
            lengths[row] += steps
        self._meter.decoded(steps, count, sum(lengths), scheduler.budget)

    # --- giving way ------------------------------------------------------------------------------------------------------

    def _send_back(self, left: int) -> None:
        """All rows from `left` on return to the head of the queue with what they have."""
        running = self.scheduler.running
        if left >= len(running):
            return
        self._fetch(range(left, min(len(running), self._filled)))
        self.scheduler.requeue([(row, running[row]) for row in range(len(running) - 1, left - 1, -1)])
        self._filled = min(self._filled, left)
        self.runner.rows.move([], left)

    def _retreat(self) -> None:
        """The device had less memory than was thought: give all of it back and go on with a smaller cache.

        Nothing is lost: tokens are kept, and draws depend on stream and position alone.
        """
        runner, scheduler = self.runner, self.scheduler
        self._meter.retreats += 1
        scheduler.lengths[: self._filled] = runner.rows.look(self._filled)[1]
        self._send_back(0)
        self._ceiling = max(runner.cache.rows * runner.cache.capacity, min(self._asked, scheduler.budget)) * 3 // 4
        self.budget(self._ceiling)
        self.free()
        runner.batch_tokens = max(_SMALLEST_PREFILL, runner.batch_tokens // 2)
        if runner.device.type == "cuda":
            torch.cuda.empty_cache()
        for sample in scheduler.take_waiting(lambda s: s.limit > scheduler.budget):
            self._hand(sample, "error", f"out of memory on {runner.device}: {scheduler.too_long(sample.limit)}")

    # --- handing out -----------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Stream what is new, deliver what ended and close the gaps."""
        runner, scheduler = self.runner, self.scheduler
        states, lengths = runner.rows.look(len(scheduler.running))
        scheduler.lengths[:] = lengths
        self._stream([row for row, sample in enumerate(scheduler.running) if sample.listener is not None])
        ended = [row for row, state in enumerate(states) if state != RUNNING]
        if not ended:
            return
        # A later sequence in the same row must not read what is not a number.
        if ERROR in states:
            runner.cache.clear([row for row in ended if states[row] == ERROR])
        self._deliver(ended, [finish_name(states[row]) for row in ended])

    def _stream(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        self._fetch(rows)
        for row in rows:
            _tell(self.scheduler.running[row])

    def _deliver(self, rows: Sequence[int], finishes: Sequence[str]) -> None:
        """Hand out these rows and close the gaps; what they computed stays where others may find it."""
        runner, scheduler = self.runner, self.scheduler
        self._fetch(rows)
        samples = [scheduler.running[row] for row in rows]
        keep = {}
        if self._keep:
            # The newest token was never fed to the model, nor were all others of a row that was dropped too early.
            whole = [finish != "error" and s.length > s.fed for s, finish in zip(samples, finishes)]
            keep = {r: tuple(s.sequence[:-1]) for r, s, computed in zip(rows, samples, whole) if computed}
        used = max(scheduler.lengths)
        moves = scheduler.release(rows, keep)
        runner.cache.copy(*_sides(moves), used)
        runner.rows.move(moves, len(scheduler.running))
        self._lend()
        self._filled = len(scheduler.running)
        for sample, finish in zip(samples, finishes):
            self._hand(sample, finish, _NOT_NUMBERS if finish == "error" else None)

    def _hand(self, sample: Sample, finish: str, error: str | None = None) -> None:
        _tell(sample)
        self._meter.tokens += len(sample.tokens)
        versions = sample.versions if len(sample.versions) > 1 else []
        self._give(sample, Completion(sample.tokens, sample.log_probs, finish, self.version, error, versions))

    def _fetch(self, rows: Iterable[int]) -> None:
        """What these rows sampled, from the device to the host."""
        pairs = [(row, self.scheduler.running[row]) for row in rows]
        written = self.runner.rows.read([(row, len(s.prompt), self.scheduler.lengths[row]) for row, s in pairs])
        for (_, sample), (tokens, log_probs) in zip(pairs, written):
            sample.versions = merged([*sample.versions, (self.version, len(tokens) - len(sample.tokens))])
            sample.tokens, sample.log_probs = tokens, log_probs


def _tell(sample: Sample) -> None:
    if sample.listener is not None and len(sample.tokens) > sample.told:
        new = slice(sample.told, None)
        sample.told = len(sample.tokens)
        sample.listener(sample.tokens[new], sample.log_probs[new])


def _sides(moves: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [a for a, _ in moves], [b for _, b in moves]
