"""Runs vLLM's LLMEngine in its own thread. Requests and control commands are handled between two engine
steps."""

from __future__ import annotations

import inspect
import itertools
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from strop.extras import require
from strop.registry import did_you_mean
from strop.rollout.base import Completion, EngineDied, Request, Sampling, error_completions
from strop.rollout.routed_experts import engine_experts
from strop.rollout.vllm.images import engine_prompt

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

RETURN_EXPERTS = "enable_return_routed_experts"
"""The argument of vLLM with which outputs have the experts of their tokens."""
EXTENSION = "strop.rollout.vllm.extension.Extension"
SLEEP_TAGS = frozenset({"weights", "kv_cache"})
"""Parts of vLLM's memory that sleep mode frees."""
_EXTRA = "vllm"
_WHY = "rollout.name=vllm"
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same cores while the engine is idle
}
"""Defaults of vLLM's environment variables."""


_SoFar = tuple[list[int], list[float], list[np.ndarray]]


class Host(Protocol):
    """Where vLLM runs: in this process (Driver), in a subprocess (Remote) or as a server (VllmServer)."""

    log_probs: str
    """exact or filtered: see extension.py."""

    def submit(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        """Start a request."""
        ...

    def call(self, command: str, *arguments: object) -> Future[object]:
        """load(contents, version) | set_version(version) | abort() | sleep() | wake()."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _RequestState:
    """A request and its finished samples."""

    request: Request
    future: Future[list[Completion]]
    finished: dict[int, Completion] = field(default_factory=dict)

    def add(self, index: int, completion: Completion) -> None:
        self.finished[index] = completion
        if len(self.finished) == self.request.n:
            self.future.set_result([self.finished[i] for i in range(self.request.n)])


@dataclass(eq=False)
class _RunningSample:
    state: _RequestState
    index: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) of weights that were replaced during sampling."""

    @property
    def tokens_in_spans(self) -> int:
        return sum(count for _, count in self.spans)

    def finish(
        self,
        ids: list[int],
        log_probs: list[float],
        finish: str,
        version: int,
        error: str | None = None,
        experts: Sequence[np.ndarray] = (),
    ) -> None:
        """`experts`: those of the first tokens of prompt and completion, in parts, as vLLM returns them."""
        spans = []
        if self.spans:
            spans = [*self.spans, (version, len(ids) - self.tokens_in_spans)]
        completion = Completion(ids, log_probs, finish, version, error, spans)
        if experts:
            length = len(self.state.request.ids) + len(ids)
            try:
                completion.experts = engine_experts(np.concatenate(list(experts)), length)
            except ValueError as problem:
                completion = Completion([], [], "error", version, str(problem))
        self.state.add(self.index, completion)


class Driver:
    def __init__(self, arguments: Mapping[str, object], seeded: bool = False) -> None:
        """`arguments`: of vLLM's EngineArgs. `seeded`: use the seed of each request, which slows vLLM's
        sampler down."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._vllm = require("vllm", extra=_EXTRA, why=_WHY)
        self._platform = require("vllm.platforms", extra=_EXTRA, why=_WHY).current_platform
        self._seeded = seeded
        self._engine = self._start(dict(arguments))
        self.log_probs: str = self._engine.collective_rpc("strop_prepare")[0]
        self.version = 0
        self._request_ids = itertools.count()
        self._running: dict[str, _RunningSample] = {}
        self._asleep: set[str] = set()
        """Tags of memory that is freed now."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="strop-vllm", daemon=True)
        self._thread.start()

    def _start(self, arguments: dict[str, object]) -> LLMEngine:
        engine_args = require("vllm.engine.arg_utils", extra=_EXTRA, why=_WHY).EngineArgs
        known = {each.name for each in fields(engine_args)}
        for name in arguments:
            if name not in known:
                if name == RETURN_EXPERTS:
                    raise ValueError(
                        f"router_replay.mode=R3: vLLM {self._vllm.__version__} cannot return the experts of "
                        "tokens. Install a newer one, or set rollout.name=native or router_replay.mode=R2."
                    )
                raise ValueError(
                    f"rollout.engine_kwargs.vllm: vLLM {self._vllm.__version__} has no argument "
                    f"{name!r}.{did_you_mean(name, known)}"
                )
        if arguments.get(RETURN_EXPERTS) and self._platform.is_cpu():
            raise ValueError(
                "router_replay.mode=R3: vLLM's CPU build cannot return the experts of tokens, which needs "
                "Triton. Set rollout.name=native, or router_replay.mode=R2."
            )
        if arguments.get(RETURN_EXPERTS) and "aux_output_config" in known:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the only one that returns them
        arguments.setdefault("worker_extension_cls", EXTENSION)
        if not self._platform.is_sleep_mode_available():
            arguments.pop("enable_sleep_mode", None)
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        if self._platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments.setdefault("kv_cache_memory_bytes", _available_memory() // 4)
        engine = require("vllm.v1.engine.llm_engine", extra=_EXTRA, why=_WHY).LLMEngine
        return engine.from_engine_args(engine_args(**arguments))

    # --- called from other threads --------------------------------------------------------------------------

    def submit(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        self._between_steps(lambda: self._add(request, sampling, future), future.set_exception)
        return future

    def call(self, command: str, *arguments: object) -> Future[object]:
        future: Future[object] = Future()
        commands: dict[str, Callable[..., None]] = {
            "load": self._load,
            "set_version": self._set_version,
            "abort": self._abort,
            "sleep": self._sleep,
            "wake": self._wake,
        }

        def run() -> None:
            try:
                commands[command](*arguments)
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                future.set_exception(error)
            else:
                future.set_result(None)

        self._between_steps(run, future.set_exception)
        return future

    def close(self) -> None:
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout=30)
        core = getattr(self._engine, "engine_core", None)
        if core is not None:
            core.shutdown()

    def _between_steps(self, work: Callable[[], None], fail: Callable[[EngineDied], None]) -> None:
        def unless_failed() -> None:
            if self._failure is None:
                work()
            else:
                fail(_died(self._failure))

        self._inbox.put(unless_failed)

    # --- in the engine's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._handle_inbox(wait=not self._running)
                if self._running:
                    for output in self._engine.step():
                        if output.finished:
                            self._finish(output)
            except Exception as error:  # noqa: BLE001 - all waiting callers must get the error
                self._fail(error)

    def _handle_inbox(self, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        states = {id(sample.state): sample.state for sample in self._running.values()}
        self._running = {}
        for state in states.values():
            state.future.set_exception(_died(error))

    def _add(self, request: Request, sampling: Sampling, future: Future[list[Completion]]) -> None:
        state = _RequestState(request, future)
        number = next(self._request_ids)
        added = []
        try:
            prompt = engine_prompt(request)
            for index in range(request.n):
                name = f"{number}-{index}"
                parameters = self._parameters(request, sampling, index)
                self._engine.add_request(name, dict(prompt), parameters)
                self._running[name] = _RunningSample(state, index)
                added.append(name)
        except (ValueError, TypeError) as error:
            self._engine.abort_request(added)
            for name in added:
                del self._running[name]
            future.set_result(error_completions(request, f"vLLM refuses it: {error}", self.version))
        except Exception as error:
            if not added:  # else `_fail` finds it among the running ones
                future.set_exception(_died(error))
            raise

    def _parameters(self, request: Request, sampling: Sampling, index: int) -> SamplingParams:
        module = require("vllm.sampling_params", extra=_EXTRA, why=_WHY)
        parameters: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": request.max_tokens,
            "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_ids),
            "ignore_eos": True,  # stop_ids decide where a completion ends
            "logprobs": 0,
            "detokenize": False,
            "output_kind": module.RequestOutputKind.FINAL_ONLY,
        }
        if self._seeded and request.seed is not None:
            parameters["seed"] = (request.seed + request.first + index) % (1 << 63)
        if hasattr(module.SamplingParams, "flat_logprobs"):
            parameters["flat_logprobs"] = True
        return module.SamplingParams(**parameters)

    def _finish(self, answer: RequestOutput) -> None:
        output = answer.outputs[0]
        finish = str(output.finish_reason)
        error = None
        if finish not in ("stop", "length", "abort"):
            error = f"vLLM ended it: {finish}"
            finish = "error"
        log_probs = _sampled_log_probs(output.token_ids, output.logprobs)
        # Some versions return the experts of the prompt separately.
        parts = [getattr(answer, "prompt_routed_experts", None), getattr(output, "routed_experts", None)]
        experts = [part for part in parts if part is not None]
        sample = self._running.pop(answer.request_id)
        sample.finish(list(output.token_ids), log_probs, finish, self.version, error, experts)

    def _abort(self) -> None:
        outputs = self._outputs_so_far()
        self._engine.abort_request(list(self._running))
        samples = self._running
        self._running = {}
        for name, sample in samples.items():
            ids, log_probs, experts = outputs.get(name, ([], [], []))
            sample.finish(ids, log_probs, "abort", self.version, experts=experts)

    def _outputs_so_far(self) -> dict[str, _SoFar]:
        """Tokens, log-probs and experts of the running samples."""
        outputs = {}
        for state in self._engine.output_processor.request_states.values():
            name = getattr(state, "external_req_id", None) or state.request_id
            ids = list(state.detokenizer.output_token_ids)
            log_probs = _sampled_log_probs(ids, state.logprobs_processor.logprobs or [])
            length = min(len(ids), len(log_probs))
            experts = list(getattr(state, "routed_experts_chunks", ()))
            outputs[name] = (ids[:length], log_probs[:length], experts)
        return outputs

    def _load(self, contents: str, version: int | None) -> None:
        """Load a bucket of weights; the last bucket has the version."""
        self._wake_tags({"weights"})
        self._engine.collective_rpc("strop_load", args=(contents,))
        if version is None:
            return
        # Running requests continue with the new weights, and their KV cache is computed again.
        reset = self._engine.reset_prefix_cache
        if "reset_running_requests" in inspect.signature(reset).parameters:
            reset(reset_running_requests=True)
        else:
            reset()
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        outputs = self._outputs_so_far() if self._running else {}
        for name, sample in self._running.items():
            ids, *_ = outputs.get(name, ([], [], []))
            sample.spans.append((self.version, len(ids) - sample.tokens_in_spans))
        self.version = version

    def _sleep(self) -> None:
        if self._running:
            raise ValueError("sleep() while requests are running: wait for them, or call abort() first.")
        if self._can_sleep and not self._asleep:
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=1)
            self._asleep = set(SLEEP_TAGS)

    def _wake(self) -> None:
        self._wake_tags(SLEEP_TAGS)

    def _wake_tags(self, tags: Set[str]) -> None:
        """Allocate freed memory again; new weights may arrive before the KV cache is needed."""
        needed = self._asleep & tags
        if needed:
            self._engine.wake_up(sorted(needed))
            self._asleep -= needed


def _sampled_log_probs(ids: Sequence[int], steps: Any) -> list[float]:
    """Log-probs of the sampled tokens. `steps`: FlatLogprobs, whose first entry of a step is the sampled
    token, or a list with a mapping per step."""
    if hasattr(steps, "start_indices"):
        return [steps.logprobs[start] for start in steps.start_indices]
    return [step[token].logprob for token, step in zip(ids, steps)]


def _died(error: BaseException | None) -> EngineDied:
    return EngineDied(f"vLLM failed with {type(error).__name__}: {error}")


def _available_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
