"""The native engine: continuous batching over the trainer's own module.

A step is schedule, run, postprocess: seat waiting samples and compute their prompts, sample tokens for all running rows, hand
out those that ended and close the gaps they leave.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strop.rollout.base import Completion, Request, Sampling, check_request, failed
from strop.rollout.native.dress import Changes, on_loan
from strop.rollout.native.front import Front
from strop.rollout.native.meter import Meter
from strop.rollout.native.rows import ERROR, RUNNING, finish_name
from strop.rollout.native.runner import Runner
from strop.rollout.native.sampler import stream
from strop.rollout.native.scheduler import Sample, Scheduler
from strop.rollout.native.ticket import Ticket
from strop.rollout.weights import copy_weights, longest_sequence

_NOT_NUMBERS = "the model's logits are not numbers (NaN or infinity)"
_STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 16}


class NativeEngine:
    """Samples from `model` itself: a weight update is seen at the next step, and costs nothing."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int = 8192,
        enable_chunked_prefill: bool = True,
        gpu_memory_utilization: float = 0.5,
        cache_bytes: int | None = None,
        enforce_eager: bool = False,
        seed: int = 0,
    ) -> None:
        """`cache_bytes`: memory of the cache; by default what `gpu_memory_utilization` leaves, or a quarter of the host's."""
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens} must be at least 1."
            )
        self.model, self.seed, self.version = model, seed, 0
        self.longest = longest_sequence(model, max_model_len)
        self._limits: dict[str, Any] = {
            "batch_tokens": max_num_batched_tokens,
            "chunked": enable_chunked_prefill,
            "graphs": not enforce_eager,
        }
        self._max_rows, self._share, self._cache_bytes = max_num_seqs, gpu_memory_utilization, cache_bytes
        self._runner: Runner | None = None
        self._scheduler = Scheduler(max_rows=max_num_seqs, budget=0)
        self._tickets: dict[int, Ticket] = {}
        self._arrivals = 0
        self._abort_below = 0
        self._lock = threading.RLock()
        self._loans, self._loan_stack = 0, ExitStack()
        self._changes: Changes | None = None
        self._front = Front(self)
        self._meter = Meter()

    # --- the protocol ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        tickets = [self.submit(request, sampling) for request in requests]
        with self.loan():
            while not all(ticket.done for ticket in tickets):
                self.step()
        return [ticket.result() for ticket in tickets]

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        return await self._front.ask(request, sampling)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._lock:
            copy_weights(self.model, weights)
            self.version = version

    def sleep(self) -> None:
        with self._lock:
            if not self._scheduler.idle:
                raise ValueError("sleep() while requests are running: wait for them, or call abort() first.")
            if self._runner is not None:
                self._runner.free()

    def wake(self) -> None:
        """Nothing to do: the cache is taken when the next request needs it."""

    def abort(self) -> None:
        self._abort_below = self._arrivals

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            return self._meter.read(self._max_rows)

    def close(self) -> None:
        self.abort()
        with self._lock:
            self._drop_aborted()
            self._runner = None
        self._front.close()

    # --- requests in, completions out ------------------------------------------------------------------------------------

    def submit(self, request: Request, sampling: Sampling, on_done: Any = None) -> Ticket:
        """Queue a request; `step` until its ticket is done."""
        with self._lock:
            number = self._arrivals
            self._arrivals += 1
            seed = stream(self.seed, number) if request.seed is None else request.seed
            ticket = Ticket(number, replace(request, n=max(1, request.n)), seed, on_done)
            why = check_request(request, self.vocabulary, self.longest, sampling)
            wanted = sampling.max_tokens if request.max_tokens is None else request.max_tokens
            limit = min(self.longest, len(request.ids) + wanted)
            why = why or self._ready().too_long(limit)
            if why is not None:
                for index, completion in enumerate(failed(request, why, self.version)):
                    ticket.deliver(index, completion)
                return ticket
            settings = replace(sampling, stop_ids=tuple(sampling.stop_ids), max_tokens=0)
            self._tickets[number] = ticket
            prompt = list(request.ids)
            self._scheduler.add(Sample(number, index, prompt, limit, settings) for index in range(ticket.request.n))
            return ticket

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def step(self) -> None:
        """One round for everybody. If the module fails, all tickets fail with it and the engine is empty again."""
        with self._lock, torch.no_grad():
            self._drop_aborted()
            if self._scheduler.idle:
                return
            try:
                self._admit()
                self._decode()
                self._hand_out()
            except BaseException as error:
                self._scheduler.clear()
                tickets, self._tickets = list(self._tickets.values()), {}
                if self._runner is not None:
                    self._runner.free()
                for ticket in tickets:
                    ticket.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _ready(self) -> Scheduler:
        """The scheduler, once the module was measured and the budget of the cache is known."""
        if self._runner is None:
            with self.loan(), torch.no_grad():
                self._runner = Runner(self.model, **self._limits)
            size = self._cache_bytes or self._memory(self._runner.device)
            self._scheduler.budget = size // self._runner.cache.bytes_per_token
        return self._scheduler

    def _memory(self, device: torch.device) -> int:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return max(0, int(min(free * 0.9, free - total * (1 - self._share))))
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4

    # --- one step --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        runner, scheduler = self._runner, self._scheduler
        assert runner is not None
        kept = len(scheduler.running)
        admissions = scheduler.admit()
        if not admissions:
            return
        self._fit(kept)
        streams = [stream(self._tickets[a.sample.request].seed, a.sample.index) for a in admissions]
        with self._meter.prefill(runner.device):
            computed = runner.prefill(admissions, streams)
        self._meter.prompt_tokens += computed
        for admission in admissions:
            scheduler.lengths[admission.row] += 1
        self._hand_out()

    def _fit(self, kept: int) -> None:
        """The cache large enough for the running rows; the first `kept` of them hold something."""
        runner, scheduler = self._runner, self._scheduler
        assert runner is not None
        stops = max(len(sample.settings.stop_ids) for sample in scheduler.running)
        rows, capacity = len(scheduler.running), max(scheduler.lengths) + 1
        if rows > runner.cache.rows or capacity > runner.cache.capacity:
            rows, capacity = scheduler.shape()
            # Keep the size of the other direction where memory allows: batches of different shapes (training, validation) would
            # else take turns in making the cache anew, and recorded steps with it.
            kept_rows, kept_capacity = max(rows, runner.cache.rows), max(capacity, runner.cache.capacity)
            if kept_rows * kept_capacity <= scheduler.budget:
                rows, capacity = kept_rows, kept_capacity
        runner.fit(rows, capacity, kept, max(1, stops))

    def _decode(self) -> None:
        runner, scheduler = self._runner, self._scheduler
        assert runner is not None
        if not scheduler.running:
            return
        if max(scheduler.lengths) >= runner.cache.capacity:
            self._evict()
            self._fit(len(scheduler.running))
        count, lengths = len(scheduler.running), scheduler.lengths
        left = max(sample.limit - length for sample, length in zip(scheduler.running, lengths))
        steps = max(1, min(_STEPS_BETWEEN_LOOKS.get(runner.device.type, 1), left, runner.cache.capacity - max(lengths)))
        with self._meter.decode(runner.device):
            runner.decode(scheduler.running, lengths, steps)
        for row in range(count):
            lengths[row] += steps
        self._meter.decoded(steps, count, sum(lengths), self._scheduler.budget)

    def _evict(self) -> None:
        """Send the last rows back to the queue where the cache cannot grow for all."""
        assert self._runner is not None
        evicted = self._scheduler.make_room()
        written = self._runner.rows.read([(row, len(s.prompt), self._scheduler.lengths[row]) for row, s in evicted])
        for (_, sample), (tokens, log_probs) in zip(evicted, written):
            sample.tokens, sample.log_probs = tokens, log_probs
        self._scheduler.requeue(evicted)
        if evicted:
            self._runner.rows.move([], len(self._scheduler.running))
            self._meter.preemptions += len(evicted)

    def _hand_out(self) -> None:
        """Deliver what ended and close the gaps."""
        runner, scheduler = self._runner, self._scheduler
        assert runner is not None
        states, lengths = runner.rows.look(len(scheduler.running))
        scheduler.lengths[:] = lengths
        ended = [row for row, state in enumerate(states) if state != RUNNING]
        if not ended:
            return
        self._deliver(ended, [finish_name(states[row]) for row in ended])
        # A later sequence in the same row must not read what is not a number.
        if ERROR in states:
            runner.cache.clear([row for row in ended if states[row] == ERROR])
        self._release(ended)

    def _release(self, rows: Sequence[int]) -> None:
        assert self._runner is not None
        used = max(self._scheduler.lengths)
        moves = self._scheduler.release(rows)
        self._runner.cache.copy([a for a, _ in moves], [b for _, b in moves], used)
        self._runner.rows.move(moves, len(self._scheduler.running))

    def _deliver(self, rows: Sequence[int], finishes: Sequence[str]) -> None:
        assert self._runner is not None
        samples = [self._scheduler.running[row] for row in rows]
        written = self._runner.rows.read([(r, len(s.prompt), self._scheduler.lengths[r]) for r, s in zip(rows, samples)])
        for sample, (ids, log_probs), finish in zip(samples, written, finishes):
            self._meter.tokens += len(ids)
            error = _NOT_NUMBERS if finish == "error" else None
            self._give(sample, Completion(ids, log_probs, finish, self.version, error))

    def _give(self, sample: Sample, completion: Completion) -> None:
        ticket = self._tickets[sample.request]
        ticket.deliver(sample.index, completion)
        if ticket.done:
            del self._tickets[sample.request]

    def _drop_aborted(self) -> None:
        """End what arrived before `abort` was called, with what it has."""
        below, scheduler = self._abort_below, self._scheduler
        rows = [row for row, sample in enumerate(scheduler.running) if sample.request < below]
        if rows:
            self._deliver(rows, ["abort"] * len(rows))
            self._release(rows)
        for sample in [s for s in scheduler.waiting if s.request < below]:
            scheduler.waiting.remove(sample)
            self._give(sample, Completion(sample.tokens, sample.log_probs, "abort", self.version))

    @contextmanager
    def loan(self) -> Iterator[None]:
        """The module in rollout dress for as long as anybody needs it."""
        with self._lock:
            if self._loans == 0:
                if self._changes is None:
                    self._changes = Changes(self.model)
                self._loan_stack.enter_context(on_loan(self.model, self._changes))
            self._loans += 1
        try:
            yield
        finally:
            with self._lock:
                self._loans -= 1
                if self._loans == 0:
                    self._loan_stack.close()
