"""The sglang engine: an SGLang server on this machine, started here or already running, over its HTTP API.

Weights are replaced in a session (begin, tensors, end) while generation is paused. Running requests compute
their KV cache again with the new weights and continue.
"""

from __future__ import annotations

import base64
import io
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from torch import Tensor, nn
from torch import multiprocessing as torch_sharing

from strop.config.schema.rollout import CheckpointEngineConfig, RolloutConfig
from strop.models.load import load_config, resolve
from strop.rollout.base import Completion, EngineDied, Request, Sampling, error_completions
from strop.rollout.external import CompletionsFuture, ExternalEngine, engine_dtype, model_source
from strop.rollout.external_host import HostProcess, Json, JsonClient, ServerRefused, completions_of
from strop.rollout.routed_experts import decoded_experts, engine_experts

_START_SECONDS = 900.0


class SglangEngine(ExternalEngine):
    def __init__(
        self,
        model: nn.Module | str | Path,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = RolloutConfig.max_num_seqs,
        seed: int = 0,
        dtype: str = "auto",
        load_format: str = RolloutConfig.load_format,
        gpu_memory_utilization: float = RolloutConfig.gpu_memory_utilization,
        enable_prefix_caching: bool = RolloutConfig.enable_prefix_caching,
        tensor_model_parallel_size: int = RolloutConfig.tensor_model_parallel_size,
        data_parallel_size: int = RolloutConfig.data_parallel_size,
        expert_parallel_size: int = RolloutConfig.expert_parallel_size,
        free_cache_engine: bool = RolloutConfig.free_cache_engine,
        bucket_megabytes: int = CheckpointEngineConfig.update_weights_bucket_megabytes,
        quantization: str | None = RolloutConfig.quantization,
        kv_cache_dtype: str = RolloutConfig.kv_cache_dtype,
        record_experts: bool = False,
        engine_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """`model`: a module, whose weights are copied, or the folder of a model.

        `engine_kwargs` are arguments of SGLang's server and three of Strop: `python` (the interpreter of
        another environment that has SGLang), `url` (a server that is already running, with its own settings),
        `seeded` (use the seeds of requests; the server must run with enable_deterministic_inference).
        """
        server_arguments = dict(engine_kwargs or {})
        python = str(server_arguments.pop("python", None) or sys.executable)
        url = server_arguments.pop("url", None)
        self._seeded = bool(server_arguments.pop("seeded", False))
        source = model_source(model, max_model_len)
        super().__init__(source)
        self._bucket_bytes = bucket_megabytes << 20
        self._tp_size = tensor_model_parallel_size
        self._experts: tuple[int, int] | None = None
        """Layers and experts of a token, in replies that have them."""
        if record_experts:
            known = load_config(resolve(source.folder)) if source.module is None else source.module.config
            config = known.get_text_config()
            self._experts = (config.num_hidden_layers, config.num_experts_per_tok)
        self._process: HostProcess | None = None
        self._client_or_none: JsonClient | None = None
        # The memory saver preloads a library that needs libcuda.so.1: without it the server exits with 127.
        self._frees_cache = free_cache_engine and server_arguments.get("device") != "cpu"
        if url is None:
            port = _free_port()
            arguments = {
                "model_path": source.folder,
                "host": "127.0.0.1",
                "port": port,
                "skip_tokenizer_init": True,
                "load_format": load_format if source.shapes is None else "dummy",
                "context_length": source.max_model_len,
                "dtype": engine_dtype(dtype, model),
                "random_seed": seed,
                "tp_size": tensor_model_parallel_size,
                "dp_size": data_parallel_size,
                "ep_size": expert_parallel_size,
                "max_running_requests": max_num_seqs,
                "mem_fraction_static": gpu_memory_utilization,
                "disable_radix_cache": not enable_prefix_caching,
                "enable_memory_saver": self._frees_cache,
                "enable_return_routed_experts": record_experts,
                "quantization": quantization,
                "kv_cache_dtype": "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype,
                **server_arguments,
            }
            self._process = HostProcess(
                "sglang", [python, "-m", "sglang.launch_server", *command_line(arguments)]
            )
            url = f"http://127.0.0.1:{port}"
        try:
            describe_exit = None if self._process is None else self._process.describe_exit
            self._client_or_none = JsonClient("sglang", str(url), describe_exit)
            self._wait_until_healthy(self._process)
            self._load_initial_weights(model)
        except BaseException:
            self.close()
            raise

    @property
    def _client(self) -> JsonClient:
        assert self._client_or_none is not None
        return self._client_or_none

    def _wait_until_healthy(self, process: HostProcess | None) -> None:
        """Wait for the server that we started; one that was already running must be healthy now."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._client.is_healthy("/health"):
            if process is None:
                self._client.request("GET", "/health")
                return
            if not process.alive or time.monotonic() > deadline:
                raise EngineDied(f"SGLang did not start. {process.describe_exit()}")
            time.sleep(0.5)

    # --- requests -------------------------------------------------------------------------------------------

    def _send_request(self, request: Request, sampling: Sampling) -> CompletionsFuture:
        future: CompletionsFuture = Future()

        def on_reply(done: Future[Json]) -> None:
            error = done.exception()
            if error is None:
                read = partial(self._completions, request, done.result())
                future.set_result(completions_of(request, "sglang", self.version, read, request.n))
            elif isinstance(error, ServerRefused):
                future.set_result(error_completions(request, str(error), self.version))
            else:
                future.set_exception(error)

        self._client.send("POST", "/generate", self._body(request, sampling)).add_done_callback(on_reply)
        return future

    def _completions(self, request: Request, replies: Sequence[Mapping[str, Json]]) -> list[Completion]:
        return [self._completion(request, reply) for reply in replies]

    def _completion(self, request: Request, reply: Mapping[str, Json]) -> Completion:
        completion = read_completion(reply, self.version)
        found = reply["meta_info"].get("routed_experts")
        if self._experts is not None and found is not None:
            length = len(request.ids) + len(completion.ids)
            completion.experts = engine_experts(decoded_experts(found, *self._experts), length)
        return completion

    def _body(self, request: Request, sampling: Sampling) -> dict[str, object]:
        """Each sample is a separate prompt; the server's prefix cache computes the prompt once."""
        stops = [] if sampling.ignore_eos else list(sampling.stop_ids)
        parameters: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": stops,
            "ignore_eos": not stops,
        }
        sampling_params = [dict(parameters) for _ in range(request.n)]
        if self._seeded and request.seed is not None:
            for index, sample_parameters in enumerate(sampling_params):
                sample_parameters["sampling_seed"] = (request.seed + request.first + index) % (1 << 31)
        experts = {} if self._experts is None else {"return_routed_experts": True}
        return {
            **experts,
            "input_ids": [list(request.ids)] * request.n,
            "sampling_params": sampling_params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
        }

    def abort(self) -> None:
        self._client.request("POST", "/abort_request", {"abort_all": True})

    # --- weights and memory ---------------------------------------------------------------------------------

    def _push_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._client.request("POST", "/pause_generation", {"mode": "retract"})
        self._client.request("POST", "/begin_weight_update", {})
        try:
            for bucket, last in _in_buckets(weights, self._bucket_bytes):
                body: dict[str, object] = {
                    "serialized_named_tensors": [_serialized(bucket)] * self._tp_size,
                    "load_format": None,
                    "flush_cache": last,
                }
                if last:
                    body["weight_version"] = str(version)
                self._client.request("POST", "/update_weights_from_tensor", body)
        finally:
            self._client.request("POST", "/end_weight_update", {})
            self._client.request("POST", "/continue_generation", {})

    def _set_version(self, version: int) -> None:
        self._client.request(
            "POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    def sleep(self) -> None:
        if self._frees_cache:
            self._client.request("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})

    def wake(self) -> None:
        if self._frees_cache:
            self._client.request("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})

    def close(self) -> None:
        if self._client_or_none is not None:
            self._client_or_none.close()
        if self._process is not None:
            self._process.close()
        super().close()


def read_completion(reply: Mapping[str, Json], version: int) -> Completion:
    """The completion in a reply of /generate. The server's versions are strings; one that is not a number was
    not set by Strop, and `version` stands for it."""
    meta = reply["meta_info"]
    finish = meta["finish_reason"]
    kind = finish["type"] if isinstance(finish, Mapping) else str(finish)
    log_probs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
    ids = list(reply["output_ids"])
    sampled_by = _parse_version(meta.get("weight_version"), version)
    spans = []
    for span in meta.get("weight_versions") or ():
        if span:
            spans.append((_parse_version(span["version"], version), span["end"] - span["start"]))
    error = None
    if kind not in ("stop", "length", "abort") or finish.get("status_code"):
        error = f"SGLang ended it: {finish.get('message', kind)}"
        kind = "error"
    return Completion(ids, log_probs, kind, sampled_by, error, spans if len(spans) > 1 else [])


def command_line(arguments: Mapping[str, object]) -> list[str]:
    """--flags of SGLang's server: None and False are left out, True is the flag alone, a list its values."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def _parse_version(version: object, default: int) -> int:
    text = str(version)
    return int(text) if text.isdigit() else default


def _in_buckets(
    weights: Iterator[tuple[str, Tensor]], size: int
) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Copies of the weights on the CPU in buckets of about `size` bytes, each with whether it is the last."""
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, weight in weights:
        if bucket and used + weight.nbytes > size:
            yield bucket, False
            bucket = []
            used = 0
        bucket.append((name, weight.detach().to("cpu", copy=True)))
        used += weight.nbytes
    yield bucket, True


def _serialized(bucket: Sequence[tuple[str, Tensor]]) -> str:
    """Names and shared-memory handles as SGLang reads them. The file_system strategy lets any process open
    them."""
    before = torch_sharing.get_sharing_strategy()
    torch_sharing.set_sharing_strategy("file_system")
    try:
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump(list(bucket))
    finally:
        torch_sharing.set_sharing_strategy(before)
    return base64.b64encode(pickled.getvalue()).decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
