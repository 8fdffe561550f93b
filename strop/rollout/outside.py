"""What engines share that run outside the trainer's module, with a copy of its weights: vLLM and SGLang.

A subclass says how one request is asked and how weights are pushed; here are the rules of the protocol: bad
requests fail alone, answers come in order, coroutines and batches share the engine, new weights arrive whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from typing import Any

from torch import Tensor

from strop.rollout.base import Completion, Request, Sampling, check_request, failed
from strop.rollout.source import Source, weights_of

Answer = Future[list[Completion]]


class OutsideEngine:
    def __init__(self, source: Source) -> None:
        self.version = 0
        self.longest = source.longest
        self._source = source
        self._flights = Flights()

    # --- what an engine brings -------------------------------------------------------------------------------------------

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        """`request` is valid and says how many tokens it may have."""
        raise NotImplementedError

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; `weights` have the names of a saved model."""
        raise NotImplementedError

    def _stamp(self, version: int) -> None:
        """The weights stay, and are of this version from now on."""
        raise NotImplementedError

    # --- the protocol ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        answers = [self._submit(request, sampling) for request in requests]
        return [answer.result() for answer in answers]

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        return await asyncio.wrap_future(self._submit(request, sampling))

    def _submit(self, request: Request, sampling: Sampling) -> Answer:
        request = replace(request, n=max(1, request.n))
        why = check_request(request, self._source.vocabulary, self.longest, sampling)
        answer: Answer = Future()
        if why is not None:
            answer.set_result(failed(request, why, self.version))
            return answer
        wanted = sampling.max_tokens if request.max_tokens is None else request.max_tokens
        room = min(wanted, self.longest - len(request.ids))
        self._flights.start(len(request.ids))
        asked = self._ask(replace(request, max_tokens=room), sampling)

        def settle(done: Answer) -> None:
            error = done.exception()
            completions = [] if error else [_numbers_only(completion) for completion in done.result()]
            self._flights.end(sum(len(completion.ids) for completion in completions))
            with contextlib.suppress(InvalidStateError):  # whoever asked may have gone
                if error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(completions)

        asked.add_done_callback(settle)
        return answer

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        given = dict(weights)
        if given:
            self._push(self._source.as_checkpoint(self._source.check(given)), version)
        else:
            self._stamp(version)
        self.version = version

    def _take_first_weights(self, model: Any) -> None:
        """The engine starts with the module's weights, unless it read them from a folder."""
        if self._source.shapes is not None:
            self.update_weights(weights_of(model), 0)

    def stats(self) -> Mapping[str, float]:
        return self._flights.read()

    def close(self) -> None:
        self._source.close()


class Flights:
    """Requests under way: tokens, and the time in which there was at least one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._since = 0, 0.0
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._prompt_tokens = 0
        self._seconds = 0.0

    def start(self, prompt_tokens: int) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
            self._prompt_tokens += prompt_tokens

    def end(self, tokens: int) -> None:
        with self._lock:
            self._under_way -= 1
            self._tokens += tokens
            if self._under_way == 0:
                self._seconds += time.perf_counter() - self._since

    def read(self) -> dict[str, float]:
        """The numbers since the last reading."""
        with self._lock:
            now = time.perf_counter()
            seconds = self._seconds + (now - self._since if self._under_way else 0.0)
            numbers = {
                "tokens": float(self._tokens),
                "prompt_tokens": float(self._prompt_tokens),
                "seconds": seconds,
                "tokens_per_second": self._tokens / seconds if seconds else 0.0,
            }
            self._reset()
            self._since = now
            return numbers


def _numbers_only(completion: Completion) -> Completion:
    """A completion with a log-prob that is not a number becomes an error; what came before it is kept."""
    bad = next((i for i, p in enumerate(completion.log_probs) if math.isnan(p)), None)
    if bad is None:
        return completion
    why = "the model's logits are not numbers (NaN or infinity)"
    return Completion(completion.ids[:bad], completion.log_probs[:bad], "error", completion.version, why)
