"""The vllm engine: vLLM in this process, in a subprocess with another Python environment, or as a server.

`Remote` is the trainer's side of the subprocess; worker.py is the other side.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from strop.config.schema.rollout import CheckpointEngineConfig, RolloutConfig
from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.rollout.buckets import Buckets
from strop.rollout.external import CompletionsFuture, ExternalEngine, engine_dtype, model_source
from strop.rollout.external_host import HostProcess
from strop.rollout.vllm.driver import RETURN_EXPERTS, Driver, Host
from strop.rollout.vllm.server import VllmServer
from strop.rollout.vllm.wire import Header, Wire, pack_request, unpack_completions

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
        record_experts: bool = False,
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
        self.takes_images = source.takes_images and url is None
        self._buckets = Buckets(bucket_megabytes)
        arguments = {
            "model": source.folder,
            "skip_tokenizer_init": not source.takes_images,  # its processor of images needs a tokenizer
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
        if record_experts:
            arguments[RETURN_EXPERTS] = True
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


class Remote:
    """Passes requests and commands to a Driver in the subprocess."""

    def __init__(self, python: str, arguments: Mapping[str, object], seeded: bool = False) -> None:
        local, remote = socket.socketpair()
        with remote:
            command = [python, "-m", "strop.rollout.vllm.worker", str(remote.fileno())]
            self._process = HostProcess("vllm", command, pass_fds=[remote.fileno()])
        self._wire = Wire(local)
        self._message_ids = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        """By message id: of completions for a request, of None for a command."""
        self._lock = threading.Lock()
        self._death: str | None = None
        """Why the subprocess is gone."""
        self._closing = False
        self._listener: threading.Thread | None = None
        self._wire.send({"arguments": dict(arguments), "seeded": seeded})
        first = self._wire.receive()
        if first is None:
            how_it_ended = self._process.describe_exit()
            self.close()
            raise EngineDied(f"vLLM did not start. {how_it_ended}")
        if "refused" in first[0]:
            self.close()
            raise ValueError(first[0]["refused"])
        self.log_probs: str = first[0]["ready"]
        self._listener = threading.Thread(target=self._listen, name="strop-vllm-wire", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        header, numbers = pack_request(request, sampling)
        return self._send({"command": "generate", **header}, numbers)

    def call(self, command: str, *arguments: object) -> Future[object]:
        return self._send({"command": command, "arguments": list(arguments)})

    def _send(self, header: Header, numbers: bytes = b"") -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._message_ids)
        with self._lock:
            if self._death is not None:
                future.set_exception(EngineDied(self._death))
                return future
            self._pending[number] = future
        with contextlib.suppress(OSError):  # the listener sees it too, and fails all pending futures
            self._wire.send({"id": number, **header}, numbers)
        return future

    def _listen(self) -> None:
        while (message := self._wire.receive()) is not None:
            header, numbers = message
            with self._lock:
                future = self._pending.pop(header["id"])
            if "error" in header:
                kind: Callable[[str], Exception] = ValueError if header["refused"] else EngineDied
                future.set_exception(kind(f"The vllm engine: {header['error']}"))
            elif "completions" in header:
                future.set_result(unpack_completions(header, numbers))
            else:
                future.set_result(None)
        self._fail_pending()

    def _fail_pending(self) -> None:
        """The subprocess is gone: fail all pending and all later requests."""
        with self._lock:
            pending = list(self._pending.values())
            self._pending = {}
            how = "The engine was closed." if self._closing else self._process.describe_exit()
            self._death = f"The vllm engine has gone with {len(pending)} of its requests unanswered. {how}"
        for future in pending:
            future.set_exception(EngineDied(self._death))

    def close(self) -> None:
        self._closing = True
        self._wire.close()
        if self._listener is not None:
            self._listener.join()
        self._process.close()
