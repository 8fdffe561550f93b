"""The vllm engine: vLLM in this process, in a subprocess with another Python environment, or as a server."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from strop.config.schema.rollout import CheckpointEngineConfig, RolloutConfig
from strop.rollout.base import Request, Sampling
from strop.rollout.buckets import Buckets
from strop.rollout.external import CompletionsFuture, ExternalEngine, engine_dtype, model_source
from strop.rollout.vllm.driver import Driver, Host
from strop.rollout.vllm.remote import Remote
from strop.rollout.vllm.server import VllmServer

log = logging.getLogger(__name__)


class VllmEngine(ExternalEngine):
    def __init__(
        self,
        model: nn.Module | str | Path,
        *,
        max_model_len: int | None = None,
        dtype: str = "auto",
        load_format: str = RolloutConfig.load_format,
        bucket_megabytes: int = CheckpointEngineConfig.update_weights_bucket_megabytes,
        tensor_model_parallel_size: int = RolloutConfig.tensor_model_parallel_size,
        data_parallel_size: int = RolloutConfig.data_parallel_size,
        expert_parallel_size: int = RolloutConfig.expert_parallel_size,
        free_cache_engine: bool = RolloutConfig.free_cache_engine,
        engine_kwargs: Mapping[str, object] | None = None,
        **settings: object,
    ) -> None:
        """`model`: a module, whose weights are copied, or the folder of a model.

        `engine_kwargs` are arguments of vLLM and three of Strop: `python` (the interpreter of another
        environment that has vLLM), `url` (a server, which has its own settings) and `seeded` (use the seeds
        of requests). `settings` have the same names in vLLM.
        """
        library_arguments = dict(engine_kwargs or {})
        python = library_arguments.pop("python", None)
        url = library_arguments.pop("url", None)
        seeded = bool(library_arguments.pop("seeded", False))
        source = model_source(model, max_model_len)
        super().__init__(source)
        self._buckets = Buckets(bucket_megabytes)
        arguments = {
            "model": source.folder,
            "skip_tokenizer_init": True,
            "load_format": load_format if source.shapes is None else "dummy",
            "dtype": engine_dtype(dtype, model),
            "max_model_len": source.max_model_len,
            "tensor_parallel_size": tensor_model_parallel_size,
            "data_parallel_size": data_parallel_size,
            "enable_expert_parallel": expert_parallel_size > 1,
            "enable_sleep_mode": free_cache_engine,
            **settings,
            **library_arguments,
        }
        self._host: Host | None = None
        try:
            if url is not None:
                server = VllmServer(str(url), seeded)
                self.max_model_len = min(self.max_model_len, server.max_model_len)
                self._host = server
            elif python is not None:
                self._host = Remote(str(python), arguments, seeded)
            else:
                self._host = Driver(arguments, seeded)
            self._load_initial_weights(model)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> Host:
        """Where vLLM runs."""
        assert self._host is not None
        return self._host

    def _send_request(self, request: Request, sampling: Sampling) -> CompletionsFuture:
        filters = (
            sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1
        )
        if filters and self.host.log_probs == "filtered":
            _warn_about_filters()
        return self.host.submit(request, sampling)

    def _push_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """One bucket at a time; the last one has the version."""

        def deliver(contents: str, last: bool) -> None:
            self.host.call("load", contents, version if last else None).result()

        self._buckets.send(weights, deliver)

    def _set_version(self, version: int) -> None:
        self.host.call("set_version", version).result()

    def abort(self) -> None:
        self.host.call("abort").result()

    def sleep(self) -> None:
        self.host.call("sleep").result()

    def wake(self) -> None:
        self.host.call("wake").result()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._buckets.close()
        super().close()


@functools.cache
def _warn_about_filters() -> None:
    log.warning(
        "This vLLM reports log-probs after top-k, top-p, min-p and penalties: they differ from the "
        "trainer's, which knows no filters. Sample without them, or set VLLM_USE_V2_MODEL_RUNNER=0."
    )
