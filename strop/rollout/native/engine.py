"""The native engine: continuous batching over the trainer's module, in the trainer's process.

This file takes requests and returns completions; `step_loop` runs the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strop.config.derived import prefill_token_budget
from strop.config.schema.rollout import RolloutConfig, SpeculationConfig
from strop.rollout.base import (
    Completion,
    MoreRequests,
    Request,
    Sampling,
    check_request,
    completion_limit,
    copy_weights,
    num_embeddings,
)
from strop.rollout.native.adapters import NO_ADAPTER, Adapters
from strop.rollout.native.async_driver import AsyncDriver
from strop.rollout.native.borrowed_model import BorrowedModel
from strop.rollout.native.images import image_problem, prompt_images
from strop.rollout.native.lora_bank import LoraBank
from strop.rollout.native.meter import Meter, may_stay
from strop.rollout.native.quantization.cache import is_fp8
from strop.rollout.native.requests import RequestState, ScheduledSample, listener
from strop.rollout.native.runner import Runner
from strop.rollout.native.sampler import SharedSettings, stream
from strop.rollout.native.step_loop import StepLoop
from strop.rollout.position_limit import resolve_max_model_len

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from strop.models.tensor_parallel import Divided
    from strop.rollout.base import NamedWeights


class NativeEngine:
    """Samples from `model` itself: a weight update is visible at the next step and copies nothing."""

    same_stream = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = RolloutConfig.max_num_seqs,
        max_num_batched_tokens: int | None = RolloutConfig.max_num_batched_tokens,
        enable_chunked_prefill: bool = RolloutConfig.enable_chunked_prefill,
        enable_prefix_caching: bool = RolloutConfig.enable_prefix_caching,
        gpu_memory_utilization: float = RolloutConfig.gpu_memory_utilization,
        cache_bytes: int | None = None,
        enforce_eager: bool = RolloutConfig.enforce_eager,
        speculation: SpeculationConfig | None = None,
        quantization: str | None = RolloutConfig.quantization,
        kv_cache_dtype: str = RolloutConfig.kv_cache_dtype,
        record_experts: bool = False,
        seed: int = 0,
    ) -> None:
        """`cache_bytes`: memory of the KV cache; None: gpu_memory_utilization, or a quarter of the host."""
        self.model = model
        self.device = next(model.parameters()).device
        self.seed = seed
        self.version = 0
        batch_tokens = prefill_token_budget(max_num_batched_tokens, on_cpu=self.device.type == "cpu")
        if max_num_seqs < 1 or batch_tokens < 1:
            raise ValueError(f"{max_num_seqs=} and max_num_batched_tokens={batch_tokens} must be at least 1.")
        self.max_model_len = resolve_max_model_len(model.config, max_model_len)
        self._max_num_seqs = max_num_seqs
        self._prefix_caching = enable_prefix_caching
        self._memory_share = gpu_memory_utilization
        self._cache_bytes = cache_bytes
        self._tensor_parallel: Divided | None = getattr(model, "divided", None)
        self._speculation = speculation or SpeculationConfig()
        self._woke = False
        """wake() was called since memory was last measured."""
        self._kept_cache = False
        """The KV cache stayed allocated during the last sleep()."""
        self._memory_is_scarce = False
        """A model ran out of memory while the cache stayed: never keep it again."""
        self._lock = threading.RLock()
        self._step_loop: StepLoop | None = None
        self._requests: dict[int, RequestState] = {}
        self._num_submitted = 0
        self._abort_below = 0
        """Requests with a lower number are aborted at the next step."""
        self._cancelled: set[int] = set()
        """Numbers of requests that are aborted at the next step."""
        self._settings = SharedSettings()
        self._meter = Meter()
        self._cuda_stream: torch.cuda.Stream | None = None
        self.adapters = Adapters(model)
        self._lora = LoraBank(model, self.adapters.by_number)
        self._build_runner = partial(
            Runner,
            model,
            self._lora,
            batch_tokens=batch_tokens,
            chunked=enable_chunked_prefill,
            cuda_graphs=not enforce_eager and self._tensor_parallel is None,
            fp8_cache=is_fp8(kv_cache_dtype, self.device),
            record_experts=record_experts,
        )
        changed = self._weights_changed
        self.borrowed_model = BorrowedModel(model, self._lock, changed, self._lora, quantization)
        self._async_driver = AsyncDriver(self, short_calls=self.device.type == "cuda")

    # --- the engine protocol --------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: MoreRequests | None = None
    ) -> list[list[Completion]]:
        states: list[RequestState] = []
        try:
            states += (self.submit(request, sampling) for request in requests)
            pending = list(states)
            with self.borrowed_model():
                while pending or more is not None:
                    if more is not None and (free := self._num_free_slots()):
                        further = [self.submit(request, sampling) for request in more(free)]
                        more = more if further else None
                        states += further
                        pending += further
                    if pending and pending[-1].done:
                        pending.pop()
                    elif pending:
                        self.step()
                with self._lock, self._on_stream():
                    self._drop_aborted()
        except BaseException:  # of a request, `more` or a signal: the next call must not compute the others
            self._cancelled.update(state.number for state in states)
            raise
        return [state.result() for state in states]

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        if self._tensor_parallel is not None:
            raise ValueError(
                f"The weights are divided over {self._tensor_parallel.parts} ranks, which must be given the "
                "same requests at the same time; conversations are not. Set "
                "rollout.tensor_model_parallel_size=1."
            )
        return await self._async_driver.generate(request, sampling)

    def update_weights(self, weights: NamedWeights, version: int) -> None:
        """Running requests keep their tokens and continue with the new weights; their KV cache is computed
        again."""
        with self._between_steps():
            self._weights_changed()
            if self._tensor_parallel is not None:
                weights = self._tensor_parallel.own(weights)
            copy_weights(self.model, weights)
            self.borrowed_model.refresh_copies()
            self.version = version
            if self._step_loop is not None:
                self._step_loop.version = version

    def load_adapter(self, name: str, weights: Mapping[str, Tensor], scale: float) -> None:
        """See AdapterEngine. Requests in the engine finish with the weights that they began with."""
        with self._between_steps(), torch.no_grad():
            self.adapters.load(name, weights, scale)
            if self.borrowed_model.in_use:
                self._lora.install_hooks()

    def unload_adapter(self, name: str) -> None:
        with self._lock:
            self.adapters.unload(name)

    def use_stream(self, stream: torch.cuda.Stream | None) -> None:
        """With its own stream the engine samples while the trainer computes."""
        self._cuda_stream = stream

    def sleep(self) -> None:
        """Free the KV cache and quantised weights.

        If recorded CUDA graphs point into them and there is plenty of memory, they stay: recording all graphs
        again costs one or two seconds. A model that runs out of memory calls `release_memory`.
        """
        with self._lock:
            if not self.idle:
                raise ValueError("sleep() while requests are running: wait for them, or call abort() first.")
            self.borrowed_model.drop_copies()
            if self._step_loop is None:
                return
            runner = self._step_loop.runner
            plenty = not self._memory_is_scarce and may_stay(runner.device)
            self._kept_cache = plenty and bool(runner.num_recorded)
            if not self._kept_cache:
                self._step_loop.free()
                self.borrowed_model.free_copies()

    def release_memory(self) -> bool:
        """Free what `sleep` kept, and keep it never again."""
        with self._lock:
            if not self._kept_cache or self._step_loop is None:
                return False
            self._step_loop.free()
            self.borrowed_model.free_copies()
            self._kept_cache = False
            self._memory_is_scarce = True
            return True

    def wake(self) -> None:
        """Forget cached prefixes of earlier requests; the KV cache is allocated when the next request needs
        it.

        Copied keys and values may differ from computed ones in the last bits. A resumed run must have the
        numbers of a run that was never killed, so a rollout must not reuse what an earlier one left.
        """
        with self._lock:
            self._kept_cache = False
            self._woke = True
            self.borrowed_model.drop_copies()
            if self._step_loop is not None:
                self._step_loop.forget_finished()

    def abort(self, request: Request | None = None) -> None:
        """Abort all requests that were submitted until now, or only `request`."""
        if request is None:
            self._abort_below = self._num_submitted
            return
        for state in list(self._requests.values()):
            if state.request is request:
                self._cancelled.add(state.number)

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            return self._meter.read(self._max_num_seqs)

    def close(self) -> None:
        with self._lock, self._on_stream():
            self.abort()  # no thread submits a request between this and the next lines
            self._drop_aborted()
            self._step_loop = None
        self._async_driver.close()

    # --- requests in, completions out -----------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        sampling: Sampling,
        on_done: Callable[[RequestState], None] | None = None,
        *,
        multi_turn: bool = False,
    ) -> RequestState:
        """Queue a request; call `step` until its state is done. `multi_turn`: a turn of a conversation, whose
        next turn will have the same prefix."""
        with self._lock:
            number = self._num_submitted
            self._num_submitted += 1
            state = RequestState(number, request, on_done)
            scheduler = self._ready().scheduler
            limit = min(self.max_model_len, len(request.ids) + completion_limit(request, sampling))
            known = (num_embeddings(self.model), self.max_model_len, sampling, self.adapters.by_name)
            reason = check_request(request, *known, takes_images=True)
            reason = reason or scheduler.over_budget(limit)
            if request.images:
                reason = reason or image_problem(self.model, request)
            if reason is not None:
                state.refuse(reason, self.version)
                return state
            self._requests[number] = state
            seed = stream(self.seed, number) if request.seed is None else request.seed
            settings = self._settings.of(sampling)
            adapter = self.adapters.number_of(request.adapter) if request.adapter else NO_ADAPTER
            prompt = list(request.ids)
            images = prompt_images(self.model, prompt, request.images) if request.images else None
            for index in range(state.count):
                random = stream(seed, request.first + index)
                hears = listener(request, index, partial(self._fail, state))
                sample = ScheduledSample(
                    number, index, prompt, limit, settings, random, hears, multi_turn, adapter, images
                )
                scheduler.add([sample])
            return state

    def _num_free_slots(self) -> int:
        """Slots that no running or waiting sample will use."""
        scheduler = self._ready().scheduler
        return 0 if scheduler.waiting else self._max_num_seqs - len(scheduler.running)

    @property
    def idle(self) -> bool:
        """Whether nothing is running or waiting."""
        return self._step_loop is None or self._step_loop.idle

    def step(self) -> None:
        """One step for all samples. If the module fails, all requests fail with its error and the engine is
        empty again."""
        with self._lock, torch.no_grad(), self._on_stream():
            self._drop_aborted()
            self._drop_adapters()
            if self._step_loop is None or self._step_loop.idle:
                return
            try:
                self._step_loop.step()
            except BaseException as error:
                states = list(self._requests.values())
                self._requests = {}
                self._step_loop.clear()
                for state in states:
                    state.fail(error)
                if not isinstance(error, Exception):
                    raise

    def cancel(self, state: RequestState) -> None:
        """Abort one request at the next step."""
        self._cancelled.add(state.number)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """No step runs, and kernels of this thread and of the engine wait for each other."""
        with self._lock:
            if self._cuda_stream is not None:
                torch.cuda.current_stream().wait_stream(self._cuda_stream)
            yield
            if self._cuda_stream is not None:
                self._cuda_stream.wait_stream(torch.cuda.current_stream())

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._cuda_stream is None:
            return nullcontext()
        return torch.cuda.stream(self._cuda_stream)

    def _ready(self) -> StepLoop:
        """The step loop with a memory budget. The budget is measured when the cache is empty or the engine
        woke up, because other models may have allocated memory in between."""
        if self._step_loop is None:
            self._step_loop = self._build_step_loop()
        loop = self._step_loop
        cache = loop.runner.cache
        if loop.idle and (cache.rows == 0 or self._woke):
            self._woke = False
            size = self._cache_bytes
            if not size:  # what the cache already has stays available
                size = self.borrowed_model.cache_memory(self._memory_share, cache.bytes)
                size = max(cache.bytes, size - loop.runner.draft_bytes(size, self.max_model_len))
            if self._tensor_parallel is not None:  # all ranks must schedule alike
                size = self._tensor_parallel.smallest(size)
            loop.scheduler.max_num_seqs, tokens = loop.runner.rows_and_tokens(size, self._max_num_seqs)
            loop.set_budget(tokens)
        return loop

    def _build_step_loop(self) -> StepLoop:
        with self.borrowed_model(), torch.no_grad():
            runner = self._build_runner()
        loop = StepLoop(
            runner,
            max_num_seqs=self._max_num_seqs,
            prefix_caching=self._prefix_caching,
            on_finished=self._on_finished,
            before_step=self.borrowed_model.packed.before_step,
            meter=self._meter,
            speculation=self._speculation,
        )
        loop.version = self.version
        return loop

    def _weights_changed(self) -> None:
        self.borrowed_model.drop_copies()
        if self._step_loop is not None:
            self._step_loop.runner.images.stale = True
            self._step_loop.recompute_all()

    def _fail(self, state: RequestState, error: Exception) -> None:
        state.fail(error)
        self.cancel(state)

    def _on_finished(self, sample: ScheduledSample, completion: Completion) -> None:
        state = self._requests[sample.request]
        state.add(sample.index, completion)
        if state.complete:
            del self._requests[sample.request]

    def _drop_aborted(self) -> None:
        below = self._abort_below
        cancelled = set(self._cancelled)
        any_aborted = self._requests and (cancelled or min(self._requests) < below)
        if self._step_loop is not None and any_aborted:
            self._step_loop.abort(lambda sample: sample.request < below or sample.request in cancelled)
        self._cancelled -= cancelled  # others may be added meanwhile, by callbacks and other threads

    def _drop_adapters(self) -> None:
        """Free the weights of replaced adapters that no request uses any more."""
        any_replaced = len(self.adapters.by_number) > len(self.adapters.by_name)
        if any_replaced and self._step_loop is not None:
            scheduler = self._step_loop.scheduler
            self.adapters.drop_unused(sample.adapter for sample in (*scheduler.running, *scheduler.waiting))
