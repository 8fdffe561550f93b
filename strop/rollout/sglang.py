"""The sglang engine: an SGLang server of this machine, ours or one that runs already, over its own HTTP interface.

Weights are replaced in a session (begin, tensors, end) while generation is paused; requests under way are computed anew with
the new weights and go on.
"""

from __future__ import annotations

import base64
import io
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor
from torch import multiprocessing as torch_sharing

from strop.rollout.base import Completion, EngineDied, Request, Sampling, failed
from strop.rollout.http import JsonClient, Refused
from strop.rollout.outside import Answer, OutsideEngine
from strop.rollout.process import HostProcess
from strop.rollout.source import precision, source_of

_START_SECONDS = 900.0


class SglangEngine(OutsideEngine):
    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        seed: int = 0,
        dtype: str = "auto",
        load_format: str = "auto",
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        tensor_model_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        free_cache_engine: bool = False,
        bucket_megabytes: int = 2048,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`model`: a module, whose weights are taken over, or the folder of a model.

        `engine_kwargs` are arguments of SGLang's server, and ours: `python` (the interpreter of another environment that has
        SGLang), `url` (a server that runs already, with its own settings), `seeded` (honour the seeds of requests; the server
        must run with enable_deterministic_inference).
        """
        own = dict(engine_kwargs or {})
        python, url = own.pop("python", None) or sys.executable, own.pop("url", None)
        self._seeded = bool(own.pop("seeded", False))
        source = source_of(model, max_model_len)
        super().__init__(source)
        self._bucket_bytes, self._ranks = bucket_megabytes << 20, tensor_model_parallel_size
        self._process: HostProcess | None = None
        self._frees_cache = free_cache_engine
        if url is None:
            port = _free_port()
            arguments = {
                "model_path": source.folder,
                "host": "127.0.0.1",
                "port": port,
                "skip_tokenizer_init": True,
                "load_format": load_format if source.shapes is None else "dummy",
                "context_length": source.longest,
                "dtype": precision(dtype, model),
                "random_seed": seed,
                "tp_size": tensor_model_parallel_size,
                "dp_size": data_parallel_size,
                "ep_size": expert_parallel_size,
                "max_running_requests": max_num_seqs,
                "mem_fraction_static": gpu_memory_utilization,
                "disable_radix_cache": not enable_prefix_caching,
                "enable_memory_saver": free_cache_engine,
                **own,
            }
            self._process = HostProcess("sglang", [python, "-m", "sglang.launch_server", *command_line(arguments)])
            url = f"http://127.0.0.1:{port}"
        try:
            self._client = JsonClient("sglang", url, self._process.story if self._process else None)
            self._wait(self._process)
            self._take_first_weights(model)
        except BaseException:
            self.close()
            raise

    def _wait(self, process: HostProcess | None) -> None:
        """Until the server is ready; one that runs already must be."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._client.answers("/health"):
            if process is None:
                self._client.ask("GET", "/health")
                return
            if not process.alive or time.monotonic() > deadline:
                raise EngineDied(f"SGLang did not start. {process.story()}")
            time.sleep(0.5)

    # --- requests --------------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        answer: Answer = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result([read_completion(each, self.version) for each in done.result()])
            elif isinstance(error, Refused):
                answer.set_result(failed(request, str(error), self.version))
            else:
                answer.set_exception(error)

        self._client.send("POST", "/generate", self._body(request, sampling)).add_done_callback(settle)
        return answer

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """Each sample is a prompt of its own; the server computes the common beginning once."""
        stops = [] if sampling.ignore_eos else list(sampling.stop_ids)
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": stops,
            "ignore_eos": not stops,
        }
        each = [dict(settings) for _ in range(request.n)]
        if self._seeded and request.seed is not None:
            for index, own in enumerate(each):
                own["sampling_seed"] = (request.seed + request.first + index) % (1 << 31)
        return {
            "input_ids": [list(request.ids)] * request.n,
            "sampling_params": each,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
        }

    def abort(self) -> None:
        self._client.ask("POST", "/abort_request", {"abort_all": True})

    # --- weights and memory ----------------------------------------------------------------------------------------------

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._client.ask("POST", "/pause_generation", {"mode": "retract"})
        self._client.ask("POST", "/begin_weight_update", {})
        try:
            for bucket, last in _in_buckets(weights, self._bucket_bytes):
                body: dict[str, Any] = {
                    "serialized_named_tensors": [_serialized(bucket)] * self._ranks,
                    "load_format": None,
                    "flush_cache": last,
                }
                if last:
                    body["weight_version"] = str(version)
                self._client.ask("POST", "/update_weights_from_tensor", body)
        finally:
            self._client.ask("POST", "/end_weight_update", {})
            self._client.ask("POST", "/continue_generation", {})

    def _stamp(self, version: int) -> None:
        self._client.ask("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def sleep(self) -> None:
        if self._frees_cache:
            self._client.ask("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})

    def wake(self) -> None:
        if self._frees_cache:
            self._client.ask("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()
        if self._process is not None:
            self._process.close()
        super().close()


def read_completion(reply: Mapping[str, Any], version: int) -> Completion:
    """A completion of an answer of /generate. The server names versions by texts; one that is no number is not ours."""
    meta = reply["meta_info"]
    finish = meta["finish_reason"]
    kind = finish["type"] if isinstance(finish, Mapping) else str(finish)
    log_probs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
    ids = list(reply["output_ids"])
    stamped = _number(meta.get("weight_version"), version)
    spans = [
        (_number(span["version"], version), span["end"] - span["start"]) for span in meta.get("weight_versions") or () if span
    ]
    why = None
    if kind not in ("stop", "length", "abort") or finish.get("status_code"):
        kind, why = "error", f"SGLang ended it: {finish.get('message', kind)}"
    return Completion(ids, log_probs, kind, stamped, why, spans if len(spans) > 1 else [])


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """--flags of SGLang's server: None and False are left out, True is the flag alone, a list its values."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
    return words


def _number(version: Any, otherwise: int) -> int:
    return int(version) if str(version).isdigit() else otherwise


def _in_buckets(weights: Iterator[tuple[str, Tensor]], size: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Weights on the CPU in groups of about `size` bytes, each with whether it is the last."""
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, weight in weights:
        if bucket and used + weight.nbytes > size:
            yield bucket, False
            bucket, used = [], 0
        bucket.append((name, weight.detach().to("cpu", copy=True)))
        used += weight.nbytes
    yield bucket, True


def _serialized(bucket: Sequence[tuple[str, Tensor]]) -> str:
    """As SGLang reads tensors: names and handles of shared memory, which must have names to be found by other processes."""
    before = torch_sharing.get_sharing_strategy()
    torch_sharing.set_sharing_strategy("file_system")
    try:
        text = io.BytesIO()
        ForkingPickler(text).dump(list(bucket))
    finally:
        torch_sharing.set_sharing_strategy(before)
    return base64.b64encode(text.getvalue()).decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
