"""The reference engine: `generate` of transformers, slow and simple.

Requests without a seed share left-padded batches. A request with a seed runs in its own batch with its own
random state, so its samples do not depend on the rest of the batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from strop.config.schema.rollout import RolloutConfig
from strop.models.attention import PACKED, padded_attention, set_attention
from strop.models.vision.arguments import image_arguments, positions_of_videos
from strop.rollout.base import (
    Completion,
    MoreRequests,
    Request,
    Sampling,
    check_request,
    completion_limit,
    copy_weights,
    error_completions,
    num_embeddings,
    refuse_more,
)
from strop.rollout.cancellation import result_when_free
from strop.rollout.position_limit import resolve_max_model_len

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    from strop.rollout.base import NamedWeights

_NAN_LOGITS = "the model's logits are not numbers (NaN or infinity)"


class HfEngine:
    same_stream = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = RolloutConfig.max_num_seqs,
        seed: int = 0,
    ) -> None:
        """`max_num_seqs`: limit of completions per call of transformers' generate."""
        self.model = model
        self.version = 0
        self._attention = model.config._attn_implementation
        if self._attention == PACKED:
            self._attention = padded_attention(model)
        self.max_model_len = resolve_max_model_len(model.config, max_model_len)
        self._max_num_seqs = max_num_seqs
        self._seeds = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()
        self._num_calls = 0
        self._abort_up_to = 0
        """Calls of `generate` up to this number are aborted."""
        self._num_tokens = 0
        self._seconds = 0.0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: MoreRequests | None = None
    ) -> list[list[Completion]]:
        refuse_more(self, more)
        self._num_calls += 1
        call = self._num_calls
        with self._lock, torch.no_grad(), _generation_mode(self.model):
            # A trainer that shares the module may have set another attention function.
            set_attention(self.model, self._attention)
            return self._generate(requests, sampling, call)

    def _generate(self, requests: Sequence[Request], sampling: Sampling, call: int) -> list[list[Completion]]:
        results: dict[int, list[Completion]] = {}
        valid: list[int] = []
        vocab_size = num_embeddings(self.model)
        for i, request in enumerate(requests):
            reason = check_request(request, vocab_size, self.max_model_len, sampling, takes_images=True)
            if reason is None:
                valid.append(i)
            else:
                results[i] = error_completions(request, reason, self.version)
        for batch in self._batches(requests, valid, sampling):
            members = [requests[i] for i in batch]
            results.update(zip(batch, self._run_batch(members, sampling, call)))
        return [results[i] for i in range(len(requests))]

    def _batches(
        self, requests: Sequence[Request], valid: list[int], sampling: Sampling
    ) -> Iterator[list[int]]:
        """Indices of requests with the same n and token limit; a request with a seed or images is its own
        batch. A repetition penalty would count padding as a token of the prompt: then prompts of a batch
        have the same length."""

        def order(i: int) -> tuple[int, int]:
            return self._max_new_tokens(requests[i], sampling), len(requests[i].ids)

        batch: list[int] = []
        batch_key: tuple[object, ...] = ()
        for i in sorted(valid, key=order):
            request = requests[i]
            alone = i if request.seed is not None or request.images else None
            length = len(request.ids) if sampling.repetition_penalty != 1 else None
            key = (self._max_new_tokens(request, sampling), request.n, alone, length)
            if batch and (key != batch_key or (len(batch) + 1) * max(1, request.n) > self._max_num_seqs):
                yield batch
                batch = []
            batch_key = key
            batch.append(i)
        if batch:
            yield batch

    def _max_new_tokens(self, request: Request, sampling: Sampling) -> int:
        return min(completion_limit(request, sampling), self.max_model_len - len(request.ids))

    def _run_batch(
        self, requests: Sequence[Request], sampling: Sampling, call: int
    ) -> list[list[Completion]]:
        """One batch; if sampling fails because one row has NaN logits, one request at a time."""
        try:
            return self._run(requests, sampling, call)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
        return [self._run_single(request, sampling, call) for request in requests]

    def _run_single(self, request: Request, sampling: Sampling, call: int) -> list[Completion]:
        try:
            return self._run([request], sampling, call)[0]
        except RuntimeError as error:
            return error_completions(request, f"{_NAN_LOGITS}: {error}", self.version)

    def _run(self, requests: Sequence[Request], sampling: Sampling, call: int) -> list[list[Completion]]:
        """One call of transformers' generate for requests with the same n and token limit."""
        start = time.perf_counter()
        device = cast("torch.nn.Embedding", self.model.get_input_embeddings()).weight.device
        n = max(1, requests[0].n)
        ids, mask = _left_padded(requests, device)
        max_new_tokens = self._max_new_tokens(requests[0], sampling)
        seed = requests[0].seed
        if seed is None:
            seed = int(torch.randint(1 << 62, (), generator=self._seeds))
        generate = cast("Callable[..., GenerateDecoderOnlyOutput]", self.model.generate)
        positions = positions_of_videos(self.model, requests[0].ids, requests[0].images)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), positions:
            torch.manual_seed(seed)
            output = generate(
                input_ids=ids.repeat_interleave(n, 0),
                attention_mask=mask.repeat_interleave(n, 0),
                **image_arguments(self.model, requests[0].ids, requests[0].images, n),
                generation_config=_generation_config(sampling, max_new_tokens),
                stopping_criteria=StoppingCriteriaList([_Aborted(lambda: self._abort_up_to >= call)]),
            )
        tokens = output.sequences[:, ids.shape[1] :]
        steps = cast("tuple[Tensor, ...]", output.logits)
        log_probs = _log_probs(steps, tokens, sampling.temperature or 1.0)
        stops = set() if sampling.ignore_eos else set(sampling.stop_ids)
        completions = []
        for row, row_log_probs in zip(tokens.tolist(), log_probs.tolist()):
            completion = self._completion(row, row_log_probs, stops, max_new_tokens)
            self._num_tokens += len(completion.ids)
            completions.append(completion)
        self._seconds += time.perf_counter() - start
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    def _completion(
        self, ids: list[int], log_probs: list[float], stops: set[int], max_new_tokens: int
    ) -> Completion:
        finish = "length" if len(ids) == max_new_tokens else "abort"
        for i, (token, log_prob) in enumerate(zip(ids, log_probs)):
            if log_prob != log_prob:
                return Completion(ids[:i], log_probs[:i], "error", self.version, _NAN_LOGITS)
            if token in stops:
                return Completion(ids[: i + 1], log_probs[: i + 1], "stop", self.version)
        return Completion(ids, log_probs, finish, self.version)

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        work = asyncio.ensure_future(asyncio.to_thread(self.generate, [request], sampling))
        return (await result_when_free(work))[0]

    def update_weights(self, weights: NamedWeights, version: int) -> None:
        with self._lock:
            copy_weights(self.model, weights)
            self.version = version

    def use_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Ignored: generate always uses the current stream."""

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def wake(self) -> None:
        """Nothing was freed."""

    def release_memory(self) -> bool:
        return False

    def abort(self) -> None:
        self._abort_up_to = self._num_calls

    def stats(self) -> Mapping[str, float]:
        rate = self._num_tokens / self._seconds if self._seconds else 0.0
        numbers = {"tokens": float(self._num_tokens), "seconds": self._seconds, "tokens_per_second": rate}
        self._num_tokens = 0
        self._seconds = 0.0
        return numbers

    def close(self) -> None:
        self.abort()


class _Aborted(StoppingCriteria):
    """Stops all rows when `is_aborted` returns True."""

    def __init__(self, is_aborted: Callable[[], bool]) -> None:
        self._is_aborted = is_aborted

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return torch.full(
            (input_ids.shape[0],), self._is_aborted(), dtype=torch.bool, device=input_ids.device
        )


def _left_padded(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of the prompts."""
    width = max(len(request.ids) for request in requests)
    ids = []
    mask = []
    for request in requests:
        padding = [0] * (width - len(request.ids))
        ids.append([*padding, *request.ids])
        mask.append([*padding, *([1] * len(request.ids))])
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _generation_config(sampling: Sampling, max_new_tokens: int) -> GenerationConfig:
    greedy = sampling.temperature == 0
    stops = [] if sampling.ignore_eos else list(sampling.stop_ids)
    config: dict[str, object] = {
        "do_sample": not greedy,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": stops or None,
        "pad_token_id": 0,
        "repetition_penalty": float(sampling.repetition_penalty),  # transformers takes no int
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if not greedy:
        config["temperature"] = float(sampling.temperature)
        config["top_k"] = max(0, sampling.top_k)
        config["top_p"] = sampling.top_p
        config["min_p"] = sampling.min_p or None
    return GenerationConfig(**config)


def _log_probs(steps: Sequence[Tensor], tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs of the tokens at the temperature, one step's logits at a time."""
    columns = []
    for i, logits in enumerate(steps):
        log_probs = torch.log_softmax(logits.float() / temperature, -1)
        columns.append(log_probs.gather(1, tokens[:, i : i + 1].to(logits.device)))
    return torch.cat(columns, 1)


@contextmanager
def _generation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, without the sampling defaults of the model's folder."""
    generation_config = model.generation_config
    in_training = [module for module in model.modules() if module.training]
    model.generation_config = GenerationConfig()
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
        model.generation_config = generation_config
