"""The reference engine: transformers' own `generate`, slow and plain.

Requests without a seed share left-padded batches. A request with a seed runs by itself on a random state of its own, so its
samples do not depend on the others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from strop.models.attention import PACKED, padded_attention, set_attention
from strop.rollout.base import Completion, Request, Sampling, check_request, failed
from strop.rollout.weights import copy_weights, longest_sequence


class HfEngine:
    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 256, seed: int = 0) -> None:
        """`max_num_seqs`: completions per call of generate."""
        self.model, self.version = model, 0
        own = model.config._attn_implementation
        self._attention = padded_attention(model) if own == PACKED else own
        self.longest = longest_sequence(model, max_model_len)
        self._max_rows = max_num_seqs
        self._state = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()
        self._calls = 0
        self._abort_below = 0
        self._tokens, self._seconds = 0, 0.0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self._calls += 1
        call = self._calls
        with self._lock, torch.no_grad(), _own_defaults(self.model):
            set_attention(self.model, self._attention)  # a trainer that shares the module leaves its own behind
            return self._generate(requests, sampling, call)

    def _generate(self, requests: Sequence[Request], sampling: Sampling, call: int) -> list[list[Completion]]:
        answers: dict[int, list[Completion]] = {}
        good: list[int] = []
        for i, request in enumerate(requests):
            why = check_request(request, self.model.get_input_embeddings().num_embeddings, self.longest, sampling)
            if why is None:
                good.append(i)
            else:
                answers[i] = failed(request, why, self.version)
        for batch in self._batches(requests, good, sampling):
            chosen = [requests[i] for i in batch]
            try:
                found = self._run(chosen, sampling, call)
            except RuntimeError as error:
                # Sampling refuses a whole batch when one row has no numbers: find out which.
                if "probability tensor" not in str(error):
                    raise
                found = [self._run_alone(request, sampling, call) for request in chosen]
            answers.update(zip(batch, found))
        return [answers[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request], good: list[int], sampling: Sampling) -> Iterator[list[int]]:
        batch: list[int] = []
        key: tuple[object, ...] = ()
        for i in sorted(good, key=lambda i: (self._room(requests[i], sampling), len(requests[i].ids))):
            request = requests[i]
            mine = (self._room(request, sampling), request.n, i if request.seed is not None else None)
            if batch and (mine != key or (len(batch) + 1) * max(1, request.n) > self._max_rows):
                yield batch
                batch = []
            key = mine
            batch.append(i)
        if batch:
            yield batch

    def _room(self, request: Request, sampling: Sampling) -> int:
        """New tokens this request may have."""
        wanted = sampling.max_tokens if request.max_tokens is None else request.max_tokens
        return min(wanted, self.longest - len(request.ids))

    def _run_alone(self, request: Request, sampling: Sampling, call: int) -> list[Completion]:
        try:
            return self._run([request], sampling, call)[0]
        except RuntimeError as error:
            return failed(request, f"the model's logits are not numbers (NaN or infinity): {error}", self.version)

    def _run(self, requests: Sequence[Request], sampling: Sampling, call: int) -> list[list[Completion]]:
        """One call of generate for requests with the same number of samples and new tokens."""
        start = time.perf_counter()
        device = self.model.get_input_embeddings().weight.device
        n, width = max(1, requests[0].n), max(len(r.ids) for r in requests)
        ids = torch.tensor([[0] * (width - len(r.ids)) + list(r.ids) for r in requests], device=device)
        mask = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in requests], device=device)
        room, seed = self._room(requests[0], sampling), requests[0].seed
        if seed is None:
            seed = int(torch.randint(1 << 62, (), generator=self._state))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            out = self.model.generate(
                input_ids=ids.repeat_interleave(n, 0),
                attention_mask=mask.repeat_interleave(n, 0),
                generation_config=_settings(sampling, room),
                stopping_criteria=StoppingCriteriaList([_Abort(lambda: self._abort_below >= call)]),
            )
        tokens = out.sequences[:, width:]
        log_probs = _log_probs(out.logits, tokens, sampling.temperature or 1.0)
        stops = set() if sampling.ignore_eos else set(sampling.stop_ids)
        done = [self._completion(t, p, stops, room) for t, p in zip(tokens.tolist(), log_probs.tolist())]
        self._seconds += time.perf_counter() - start
        self._tokens += sum(len(completion.ids) for completion in done)
        return [done[i : i + n] for i in range(0, len(done), n)]

    def _completion(self, ids: list[int], log_probs: list[float], stops: set[int], room: int) -> Completion:
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        bad = next((i for i, p in enumerate(log_probs[:end]) if p != p), None)
        if bad is not None:
            why = "the model's logits are not numbers (NaN or infinity)"
            return Completion(ids[:bad], log_probs[:bad], "error", self.version, why)
        if end is not None:
            return Completion(ids[:end], log_probs[:end], "stop", self.version)
        return Completion(ids, log_probs, "length" if len(ids) == room else "abort", self.version)

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        return (await asyncio.to_thread(self.generate, [request], sampling))[0]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._lock:
            copy_weights(self.model, weights)
            self.version = version

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def wake(self) -> None: ...

    def abort(self) -> None:
        self._abort_below = self._calls

    def stats(self) -> Mapping[str, float]:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        numbers = {"tokens": float(self._tokens), "seconds": self._seconds, "tokens_per_second": rate}
        self._tokens, self._seconds = 0, 0.0
        return numbers

    def close(self) -> None:
        self.abort()


class _Abort(StoppingCriteria):
    def __init__(self, asked: Any) -> None:
        self._asked = asked

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._asked(), dtype=torch.bool, device=input_ids.device)


def _settings(sampling: Sampling, room: int) -> GenerationConfig:
    greedy = sampling.temperature == 0
    stops = [] if sampling.ignore_eos else list(sampling.stop_ids)
    drawing = (
        {}
        if greedy
        else {
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    )
    return GenerationConfig(
        do_sample=not greedy,
        max_new_tokens=room,
        eos_token_id=stops or None,
        pad_token_id=0,
        repetition_penalty=sampling.repetition_penalty,
        return_dict_in_generate=True,
        output_logits=True,
        **drawing,
    )


def _log_probs(steps: Sequence[Tensor], tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs of the tokens at the temperature, one step's logits at a time."""
    columns = [
        torch.log_softmax(logits.float() / temperature, -1).gather(1, tokens[:, i : i + 1].to(logits.device))
        for i, logits in enumerate(steps)
    ]
    return torch.cat(columns, 1)


@contextmanager
def _own_defaults(model: Any) -> Iterator[None]:
    """Evaluation mode, and none of the sampling defaults that came with the model's folder."""
    before = model.generation_config
    training = [part for part in model.modules() if part.training]
    model.generation_config = GenerationConfig()
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
        model.generation_config = before
