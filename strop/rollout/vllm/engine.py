"""The vllm engine: vLLM in this process where it can be imported, in a process of another environment, or as a server."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.buckets import Buckets
from strop.rollout.outside import Answer, OutsideEngine
from strop.rollout.source import precision, source_of
from strop.rollout.vllm.driver import Driver
from strop.rollout.vllm.remote import Remote
from strop.rollout.vllm.server import Server

log = logging.getLogger(__name__)


class Host(Protocol):
    log_probs: str

    def ask(self, request: Request, sampling: Sampling) -> Future[list[Completion]]: ...

    def call(self, what: str, *arguments: Any) -> Future[Any]: ...

    def close(self) -> None: ...


class VllmEngine(OutsideEngine):
    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        bucket_megabytes: int = 2048,
        tensor_model_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        free_cache_engine: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`model`: a module, whose weights are taken over, or the folder of a model.

        `engine_kwargs` are arguments of vLLM's own, and ours: `python` (the interpreter of another environment that has vLLM),
        `url` (a server, which has its own settings) and `seeded` (honour the seeds of requests). `settings` have the same name
        there as here.
        """
        own = dict(engine_kwargs or {})
        python, url, seeded = own.pop("python", None), own.pop("url", None), bool(own.pop("seeded", False))
        source = source_of(model, max_model_len)
        super().__init__(source)
        self._buckets = Buckets(bucket_megabytes)
        arguments = {
            "model": source.folder,
            "skip_tokenizer_init": True,
            "load_format": load_format if source.shapes is None else "dummy",
            "dtype": precision(dtype, model),
            "max_model_len": source.longest,
            "tensor_parallel_size": tensor_model_parallel_size,
            "data_parallel_size": data_parallel_size,
            "enable_expert_parallel": expert_parallel_size > 1,
            "enable_sleep_mode": free_cache_engine,
            **settings,
            **own,
        }
        self._host: Host
        try:
            if url is not None:
                self._host = Server(url, seeded)
                self.longest = min(self.longest, self._host.longest)
            else:
                self._host = Driver(arguments, seeded) if python is None else Remote(python, arguments, seeded)
            self._take_first_weights(model)
        except BaseException:
            self.close()
            raise

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1
        if filters and self._host.log_probs == "filtered":
            _warn_about_filters()
        return self._host.ask(request, sampling)

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """A bucket at a time; the last one says of which version they all are."""
        self._buckets.send(
            weights, lambda contents, last: self._host.call("load", contents, version if last else None).result()
        )

    def _stamp(self, version: int) -> None:
        self._host.call("stamp", version).result()

    def abort(self) -> None:
        self._host.call("abort").result()

    def sleep(self) -> None:
        self._host.call("sleep").result()

    def wake(self) -> None:
        self._host.call("wake").result()

    def close(self) -> None:
        if hasattr(self, "_host"):
            self._host.close()
        self._buckets.close()
        super().close()


@functools.cache
def _warn_about_filters() -> None:
    log.warning(
        "This vLLM reports log-probs after top-k, top-p, min-p and penalties: they differ from the trainer's, which knows no "
        "filters. Sample without them, or set VLLM_USE_V2_MODEL_RUNNER=0."
    )
