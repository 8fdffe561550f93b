"""The native engine: continuous batching over the trainer's own module. This is its door; the work is done in `batch`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strop.config.engine import prefill_tokens
from strop.models.tensor_parallel import Divided
from strop.rollout.base import Completion, Request, Sampling, check_request, failed
from strop.rollout.native.batch import Batch
from strop.rollout.native.front import Front
from strop.rollout.native.loan import Loan
from strop.rollout.native.memory import cache_memory, may_stay
from strop.rollout.native.meter import Meter
from strop.rollout.native.runner import Runner
from strop.rollout.native.sampler import stream
from strop.rollout.native.scheduler import Sample
from strop.rollout.native.ticket import Ticket
from strop.rollout.weights import copy_weights, longest_sequence


class NativeEngine:
    """Samples from `model` itself: a weight update is seen at the next step, and costs nothing."""

    same_stream = True
    """A draw depends on its stream and position alone: an answer may be continued as if it had never stopped."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        gpu_memory_utilization: float = 0.5,
        cache_bytes: int | None = None,
        enforce_eager: bool = False,
        seed: int = 0,
    ) -> None:
        """`cache_bytes`: memory of the cache; by default what `gpu_memory_utilization` leaves, or a quarter of the host's."""
        device = next(model.parameters()).device
        max_num_batched_tokens = prefill_tokens(max_num_batched_tokens, on_cpu=device.type == "cpu")
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens} must be at least 1."
            )
        self.model, self.device, self.seed, self.version = model, device, seed, 0
        self._divided: Divided | None = getattr(model, "divided", None)
        self.longest = longest_sequence(model, max_model_len)
        self._limits: dict[str, Any] = {
            "batch_tokens": max_num_batched_tokens,
            "chunked": enable_chunked_prefill,
            "graphs": not enforce_eager and self._divided is None,  # other ranks take part in every step
        }
        self._max_rows, self._share, self._cache_bytes = max_num_seqs, gpu_memory_utilization, cache_bytes
        self._keep = enable_prefix_caching
        self._woke = self._stays = self._scarce = False
        """It woke since memory was last measured; the cache stayed when it went to sleep; somebody lacked what that took."""
        self._lock = threading.RLock()
        self._batch: Batch | None = None
        self._tickets: dict[int, Ticket] = {}
        self._arrivals = 0
        self._settings: tuple[Sampling, Sampling] | None = None
        """The newest settings, as they were given and as samples have them: most requests of a batch come with the same."""
        self._abort_below = 0
        self._unwanted: set[int] = set()
        """Numbers of tickets that are to end at the next step."""
        self._meter = Meter()
        self.stream: torch.cuda.Stream | None = None
        """Where its kernels run on a GPU; None: where everybody's do. With one of its own it samples while a trainer learns."""
        self.loan = Loan(model, self._lock, self._weights_changed)
        self._front = Front(self)

    # --- the protocol ----------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: Callable[[int], Sequence[Request]] | None = None
    ) -> list[list[Completion]]:
        """`more(rows)` gives further requests when so many rows are free, and none when there are no more."""
        tickets = [self.submit(request, sampling) for request in requests]
        left = list(tickets)
        with self.loan():
            while left or more is not None:
                if more is not None and (rows := self._free_rows()):
                    further = [self.submit(request, sampling) for request in more(rows)]
                    more = more if further else None
                    tickets += further
                    left += further
                if not left:
                    continue
                if left[-1].done:
                    left.pop()
                else:
                    self.step()
            with self._lock, self._lane():
                self._drop_unwanted()
        return [ticket.result() for ticket in tickets]

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        if self._divided is not None:
            raise ValueError(
                f"The weights are divided over {self._divided.parts} ranks, which must be given the same requests at the same "
                "time; conversations are not. Set rollout.tensor_model_parallel_size=1."
            )
        return await self._front.ask(request, sampling)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What is running goes on under the new weights: its tokens stay, their keys and values are computed again."""
        with self._lock:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            self._weights_changed()
            copy_weights(self.model, weights if self._divided is None else self._divided.own(weights))
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
            self.version = version
            if self._batch is not None:
                self._batch.version = version

    def sleep(self) -> None:
        """Give the cache's memory back.

        A cache that recorded steps point into stays where there is plenty of memory: it would be taken again a moment later,
        and recording all steps anew costs a second or two every time. Whoever runs out of memory meanwhile calls `let_go`.
        """
        with self._lock:
            if not self.idle:
                raise ValueError("sleep() while requests are running: wait for them, or call abort() first.")
            self.loan.packed.drop()
            if self._batch is None:
                return
            runner = self._batch.runner
            self._stays = runner.recorded and not self._scarce and may_stay(runner.device)
            if not self._stays:
                self._batch.free()

    def let_go(self) -> bool:
        """Give back what stayed over a sleep, and keep nothing from now on; False when there was nothing."""
        with self._lock:
            if not self._stays or self._batch is None:
                return False
            self._batch.free()
            self._stays, self._scarce = False, True
            return True

    def wake(self) -> None:
        """Forget what earlier requests left in the cache; it is taken when the next request needs it.

        Copied keys and values are those of another pass, and may differ in the last bits from computed ones. So that a run
        resumed after a kill has the numbers of one never killed, a phase must not see what the one before it left behind.
        """
        with self._lock:
            self._stays, self._woke = False, True
            self.loan.packed.drop()
            if self._batch is not None:
                self._batch.forget()

    def abort(self, request: Request | None = None) -> None:
        """End everything that was asked for until now, or this one request."""
        if request is None:
            self._abort_below = self._arrivals
        else:
            self._unwanted |= {ticket.number for ticket in list(self._tickets.values()) if ticket.request is request}

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            return self._meter.read(self._max_rows)

    def close(self) -> None:
        self.abort()
        with self._lock, self._lane():
            self._drop_unwanted()
            self._batch = None
        self._front.close()

    # --- requests in, completions out ------------------------------------------------------------------------------------

    def submit(
        self, request: Request, sampling: Sampling, on_done: Callable[[Ticket], None] | None = None, *, lasting: bool = False
    ) -> Ticket:
        """Queue a request; `step` until its ticket is done. `lasting`: a conversation, which may go on where it ended."""
        with self._lock:
            number = self._arrivals
            self._arrivals += 1
            ticket = Ticket(number, request, on_done)
            why = check_request(request, self.vocabulary, self.longest, sampling)
            wanted = sampling.max_tokens if request.max_tokens is None else request.max_tokens
            limit = min(self.longest, len(request.ids) + wanted)
            batch = self._ready()
            why = why or batch.scheduler.too_long(limit)
            if why is not None:
                for index, completion in enumerate(failed(request, why, self.version)):
                    ticket.deliver(index, completion)
                return ticket
            self._tickets[number] = ticket
            seed = stream(self.seed, number) if request.seed is None else request.seed
            if self._settings is None or self._settings[0] is not sampling:
                self._settings = sampling, replace(sampling, stop_ids=tuple(sampling.stop_ids), max_tokens=0)
            settings = self._settings[1]
            prompt = list(request.ids)
            for index in range(ticket.count):
                name = stream(seed, request.first + index)
                listener = None if request.on_tokens is None else self._listener(ticket, index)
                batch.scheduler.add([Sample(number, index, prompt, limit, settings, name, listener, lasting)])
            return ticket

    def _free_rows(self) -> int:
        """Rows that nobody runs in or waits for."""
        scheduler = self._ready().scheduler
        return 0 if scheduler.waiting else self._max_rows - len(scheduler.running)

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def idle(self) -> bool:
        return self._batch is None or self._batch.idle

    def step(self) -> None:
        """One round for everybody. If the module fails, all tickets fail with it and the engine is empty again."""
        with self._lock, torch.no_grad(), self._lane():
            self._drop_unwanted()
            if self._batch is None or self._batch.idle:
                return
            try:
                self._batch.step()
            except BaseException as error:
                tickets, self._tickets = list(self._tickets.values()), {}
                self._batch.clear()
                for ticket in tickets:
                    ticket.fail(error)
                if not isinstance(error, Exception):
                    raise

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this one any more."""
        self._unwanted.add(ticket.number)

    def _lane(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _ready(self) -> Batch:
        """The batch, once the module was measured; the cache may take what memory there is when it is empty, or when the engine
        wakes: others may have taken some meanwhile."""
        if self._batch is None:
            with self.loan(), torch.no_grad():
                runner = Runner(self.model, **self._limits)
            self._batch = Batch(runner, max_rows=self._max_rows, keep=self._keep, give=self._give, meter=self._meter)
            self._batch.after_step = self.loan.packed.stepped
            self._batch.version = self.version
        batch = self._batch
        cache = batch.runner.cache
        if batch.idle and (cache.rows == 0 or self._woke):
            self._woke = False
            # What it has already nobody else can take.
            size = self._cache_bytes or max(
                cache.bytes, cache_memory(self.model, batch.runner.device, self._share, cache.bytes)
            )
            if self._divided is not None:  # who may run, and when, must be decided alike
                size = self._divided.smallest(size)
            batch.budget(size // cache.bytes_per_token)
        return batch

    def _weights_changed(self) -> None:
        self.loan.packed.drop()
        if self._batch is not None:
            self._batch.start_over()

    def _listener(self, ticket: Ticket, index: int) -> Callable[[list[int], list[float]], None]:
        def tell(ids: list[int], log_probs: list[float]) -> None:
            assert ticket.request.on_tokens is not None
            try:
                ticket.request.on_tokens(index, ids, log_probs)
            except Exception as error:  # noqa: BLE001 - the caller's own code: its failure must not reach the others
                ticket.fail(error)
                self.cancel(ticket)

        return tell

    def _give(self, sample: Sample, completion: Completion) -> None:
        ticket = self._tickets[sample.request]
        ticket.deliver(sample.index, completion)
        if ticket.complete:
            del self._tickets[sample.request]

    def _drop_unwanted(self) -> None:
        below, unwanted = self._abort_below, self._unwanted
        if self._batch is not None and self._tickets and (unwanted or min(self._tickets) < below):
            self._batch.drop(lambda sample: sample.request < below or sample.request in unwanted)
        self._unwanted = set()
