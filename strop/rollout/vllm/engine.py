"""The vllm engine: vLLM in this process where it can be imported, or in a process of another environment."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from strop.models.build import compute_dtype
from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.outside import Answer, OutsideEngine
from strop.rollout.source import source_of
from strop.rollout.vllm.driver import Driver
from strop.rollout.vllm.remote import Remote


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

        `engine_kwargs` are arguments of vLLM's own, and ours: `python` (the interpreter of another environment that has vLLM)
        and `seeded` (honour the seeds of requests). `settings` have the same name there as here.
        """
        own = dict(engine_kwargs or {})
        python, seeded = own.pop("python", None), bool(own.pop("seeded", False))
        source = source_of(model, max_model_len)
        super().__init__(source, bucket_megabytes)
        arguments = {
            "model": source.folder,
            "skip_tokenizer_init": True,
            "load_format": load_format if source.shapes is None else "dummy",
            "dtype": _precision(dtype, model),
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
            self._host = Driver(arguments, seeded) if python is None else Remote(python, arguments, seeded)
            self._take_first_weights(model)
        except BaseException:
            self.close()
            raise

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        return self._host.ask(request, sampling)

    def _load(self, contents: str, version: int | None) -> None:
        self._host.call("load", contents, version).result()

    def abort(self) -> None:
        self._host.call("abort").result()

    def sleep(self) -> None:
        self._host.call("sleep").result()

    def wake(self) -> None:
        self._host.call("wake").result()

    def close(self) -> None:
        if hasattr(self, "_host"):
            self._host.close()
        super().close()


def _precision(asked: str, model: Any) -> str:
    """`auto` is that of the module's weights."""
    if not isinstance(model, torch.nn.Module):
        return asked
    weight = next(model.parameters())
    return str(weight.dtype if asked == "auto" else compute_dtype(asked, weight.device)).removeprefix("torch.")
