"""vLLM's engine, stepped by a thread of its own. Everything that is asked of it happens between two steps."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import queue
import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from typing import Any

from strop.extras import require
from strop.registry import did_you_mean
from strop.rollout.base import Completion, EngineDied, Request, Sampling, failed

EXTENSION = "strop.rollout.vllm.extension.Extension"
SLEEPERS = frozenset({"weights", "kv_cache"})
"""Parts of the memory that vLLM gives back while it sleeps."""
_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same cores while the engine waits
}
"""Environment of vLLM, where the user did not set it."""


@dataclasses.dataclass(eq=False)
class _Order:
    """A request and the samples of it that are done."""

    request: Request
    answer: Future[list[Completion]]
    found: dict[int, Completion] = dataclasses.field(default_factory=dict)

    def deliver(self, index: int, completion: Completion) -> None:
        self.found[index] = completion
        if len(self.found) == self.request.n:
            self.answer.set_result([self.found[i] for i in range(self.request.n)])


@dataclasses.dataclass(eq=False)
class _Sample:
    """One sample under way."""

    order: _Order
    index: int
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(version, tokens it sampled) of weights that were replaced on the way."""

    def finish(self, ids: list[int], log_probs: list[float], how: str, version: int, why: str | None = None) -> None:
        left = len(ids) - sum(count for _, count in self.spans)
        spans = [*self.spans, (version, left)] if self.spans else []
        self.order.deliver(self.index, Completion(ids, log_probs, how, version, why, spans))


class Driver:
    def __init__(self, arguments: Mapping[str, Any], seeded: bool = False) -> None:
        """`arguments`: of vLLM's EngineArgs. `seeded`: honour the seed of a request, which costs vLLM time per sample."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._vllm = require("vllm", extra="vllm", why="rollout.name=vllm")
        self._platform = require("vllm.platforms", extra="vllm", why="rollout.name=vllm").current_platform
        self._seeded = seeded
        self._engine = self._start(dict(arguments))
        self.log_probs: str = self._engine.collective_rpc("strop_prepare")[0]
        """exact, or filtered: see extension.py."""
        self.version = 0
        self._numbers = itertools.count()
        self._flying: dict[str, _Sample] = {}
        self._asleep: set[str] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="strop-vllm", daemon=True)
        self._thread.start()

    def _start(self, arguments: dict[str, Any]) -> Any:
        args = require("vllm.engine.arg_utils", extra="vllm", why="rollout.name=vllm").EngineArgs
        known = {field.name for field in dataclasses.fields(args)}
        for name in arguments:
            if name not in known:
                raise ValueError(
                    f"rollout.engine_kwargs.vllm: vLLM {self._vllm.__version__} has no argument {name!r}."
                    f"{did_you_mean(name, known)}"
                )
        arguments.setdefault("worker_extension_cls", EXTENSION)
        if not self._platform.is_sleep_mode_available():
            arguments.pop("enable_sleep_mode", None)
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        if self._platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments.setdefault("kv_cache_memory_bytes", _spare_memory() // 4)
        engine = require("vllm.v1.engine.llm_engine", extra="vllm", why="rollout.name=vllm").LLMEngine
        return engine.from_engine_args(args(**arguments))

    # --- from other threads ----------------------------------------------------------------------------------------------

    def ask(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        answer: Future[list[Completion]] = Future()
        self._between_steps(lambda: self._add(request, sampling, answer), answer)
        return answer

    def call(self, what: str, *arguments: Any) -> Future[Any]:
        """load(contents, version) | stamp(version) | abort() | sleep() | wake()."""
        answer: Future[Any] = Future()
        kinds: dict[str, Callable[..., None]] = {
            "load": self._load,
            "stamp": self._stamp,
            "abort": self._abort,
            "sleep": self._sleep,
            "wake": self._wake,
        }

        def run() -> None:
            try:
                answer.set_result(kinds[what](*arguments))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever called
                answer.set_exception(error)

        self._between_steps(run, answer)
        return answer

    def close(self) -> None:
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout=30)
        core = getattr(self._engine, "engine_core", None)
        if core is not None:
            core.shutdown()

    def _between_steps(self, work: Callable[[], None], answer: Future[Any]) -> None:
        def unless_failed() -> None:
            if self._failure is None:
                work()
            else:
                answer.set_exception(_died(self._failure))

        self._inbox.put(unless_failed)

    # --- in the thread of the engine -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._serve(wait=not self._flying)
                if self._flying:
                    for output in self._engine.step():
                        if output.finished:
                            self._deliver(output.request_id, output.outputs[0])
            except Exception as error:  # noqa: BLE001 - whatever vLLM dies of, those who wait must hear of it
                self._fail(error)

    def _serve(self, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        orders = {id(sample.order): sample.order for sample in self._flying.values()}
        self._flying = {}
        for order in orders.values():
            order.answer.set_exception(_died(error))

    def _add(self, request: Request, sampling: Sampling, answer: Future[list[Completion]]) -> None:
        order, number = _Order(request, answer), next(self._numbers)
        try:
            for index in range(request.n):
                name = f"{number}-{index}"
                parameters = self._parameters(request, sampling, index)
                self._engine.add_request(name, {"prompt_token_ids": list(request.ids)}, parameters)
                self._flying[name] = _Sample(order, index)
        except (ValueError, TypeError) as error:
            self._drop([name for name, sample in self._flying.items() if sample.order is order])
            answer.set_result(failed(request, f"vLLM refuses it: {error}", self.version))

    def _parameters(self, request: Request, sampling: Sampling, index: int) -> Any:
        kinds = require("vllm.sampling_params", extra="vllm", why="rollout.name=vllm")
        flat = {"flat_logprobs": True} if hasattr(kinds.SamplingParams, "flat_logprobs") else {}
        seed = (request.seed + request.first + index) % (1 << 63) if self._seeded and request.seed is not None else None
        return kinds.SamplingParams(
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed,
            max_tokens=request.max_tokens,
            stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids),
            ignore_eos=True,  # what ends a completion is in stop_ids
            logprobs=0,
            detokenize=False,
            output_kind=kinds.RequestOutputKind.FINAL_ONLY,
            **flat,
        )

    def _deliver(self, name: str, output: Any) -> None:
        finish = {"stop": "stop", "length": "length", "abort": "abort"}.get(output.finish_reason, "error")
        why = None if finish != "error" else f"vLLM ended it: {output.finish_reason}"
        log_probs = _sampled(output.token_ids, output.logprobs)
        self._flying.pop(name).finish(list(output.token_ids), log_probs, finish, self.version, why)

    def _abort(self) -> None:
        have = self._so_far()
        samples, self._flying = self._flying, {}
        self._engine.abort_request(list(samples))
        for name, sample in samples.items():
            sample.finish(*have.get(name, ([], [])), "abort", self.version)

    def _so_far(self) -> dict[str, tuple[list[int], list[float]]]:
        """Tokens and log-probs of what is running."""
        have = {}
        for state in self._engine.output_processor.request_states.values():
            name = getattr(state, "external_req_id", None) or state.request_id
            ids = list(state.detokenizer.output_token_ids)
            log_probs = _sampled(ids, state.logprobs_processor.logprobs or [])
            both = min(len(ids), len(log_probs))
            have[name] = (ids[:both], log_probs[:both])
        return have

    def _drop(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        for name in names:
            del self._flying[name]

    def _load(self, contents: str, version: int | None) -> None:
        self._rouse({"weights"})
        self._engine.collective_rpc("strop_load", args=(contents,))
        if version is None:
            return
        reset = self._engine.reset_prefix_cache
        # Running requests go on with the new weights, over a cache computed with the new weights.
        reset(reset_running_requests=True) if "reset_running_requests" in inspect.signature(reset).parameters else reset()
        self._stamp(version)

    def _stamp(self, version: int) -> None:
        have = self._so_far() if self._flying else {}
        for name, sample in self._flying.items():
            sample.spans.append((self.version, len(have.get(name, ([],))[0]) - sum(count for _, count in sample.spans)))
        self.version = version

    def _sleep(self) -> None:
        if self._flying:
            raise ValueError("sleep() while requests are running: wait for them, or call abort() first.")
        if self._can_sleep and not self._asleep:
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=1)
            self._asleep = set(SLEEPERS)

    def _wake(self) -> None:
        self._rouse(SLEEPERS)

    def _rouse(self, parts: Set[str]) -> None:
        """Take memory back; new weights may come before the cache is needed."""
        needed = self._asleep & parts
        if needed:
            self._engine.wake_up(sorted(needed))
            self._asleep -= needed


def _sampled(ids: Any, steps: Any) -> list[float]:
    """Log-probs of the sampled tokens; vLLM lists the sampled token first at each step."""
    if hasattr(steps, "start_indices"):
        return [steps.logprobs[start] for start in steps.start_indices]
    return [step[token].logprob for token, step in zip(ids, steps)]


def _died(error: BaseException | None) -> EngineDied:
    return EngineDied(f"vLLM failed with {type(error).__name__}: {error}")


def _spare_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
