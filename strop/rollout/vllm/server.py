"""vLLM as a server on this machine, started by the user with Strop's worker extension
(docs/rollout_engines.md has the command).

Prompts and completions are sent as token ids over the OpenAI-compatible completions API; weights by the name
of a file in shared memory, over the development API (VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from functools import partial

from strop.rollout.base import Completion, EngineDied, Request, Sampling, error_completions
from strop.rollout.external_host import Json, JsonClient, ServerRefused, completions_of
from strop.rollout.vllm.driver import SLEEP_TAGS

log = logging.getLogger(__name__)


class VllmServer:
    """Sends requests and commands to a server, with the methods of Driver."""

    def __init__(self, url: str, seeded: bool = False) -> None:
        self._client = JsonClient("vllm", url)
        self._seeded = seeded
        self._version = 0
        self._can_sleep = True
        self._asleep: set[str] = set()
        """Tags of memory that is freed now."""
        try:
            card = self._client.request("GET", "/v1/models")["data"][0]
            self._model: str = card["id"]
            self.max_model_len: int = card["max_model_len"]
            self.log_probs = str(self._rpc("strop_prepare")[0])
        except EngineDied:
            self._client.close()
            raise
        except ServerRefused as error:
            self._client.close()
            raise ValueError(
                f"The vllm server at {url} cannot be trained with: {error}. Start it with "
                "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls strop.rollout.vllm.extension.Extension."
            ) from error

    def submit(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()

        def on_reply(done: Future[Json]) -> None:
            error = done.exception()
            if error is None:
                read = partial(read_choices, done.result(), self._version)
                choices = completions_of(request, "vllm", self._version, read, count)
                copies = [copy.deepcopy(choices[i % len(choices)]) for i in range(request.n)]
                future.set_result(copies)
            elif isinstance(error, ServerRefused):
                future.set_result(error_completions(request, str(error), self._version))
            else:
                future.set_exception(error)

        # The server refuses n > 1 for greedy sampling; the one completion is copied.
        count = request.n if sampling.temperature > 0 else 1
        body = self._body(request, sampling, count)
        self._client.send("POST", "/v1/completions", body).add_done_callback(on_reply)
        return future

    def _body(self, request: Request, sampling: Sampling, count: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(request.ids),
            "n": count,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_ids),
            "ignore_eos": True,  # stop_ids decide where a completion ends
            "logprobs": 0,
            "return_token_ids": True,
        }
        if self._seeded and request.seed is not None:
            body["seed"] = (request.seed + request.first) % (1 << 63)
        return body

    def call(self, command: str, *arguments: object) -> Future[object]:
        future: Future[object] = Future()
        commands: dict[str, Callable[..., None]] = {
            "load": self._load,
            "set_version": self._set_version,
            "abort": self._abort,
            "sleep": self._sleep,
            "wake": self._wake,
        }
        try:
            commands[command](*arguments)
        except (ValueError, OSError) as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def _load(self, contents: str, version: int | None) -> None:
        self._wake_tags({"weights"})
        self._rpc("strop_load", contents)
        if version is not None:
            self._client.request("POST", "/reset_prefix_cache?reset_running_requests=true")
            self._version = version

    def _set_version(self, version: int) -> None:
        self._version = version

    def _abort(self) -> None:
        try:
            self._client.request("POST", "/abort_requests", {})
        except ServerRefused:  # older servers abort requests only by a pause
            self._client.request("POST", "/pause?mode=abort")
            self._client.request("POST", "/resume")

    def _sleep(self) -> None:
        if not self._can_sleep:
            return
        try:
            self._client.request("POST", "/sleep?level=1")
        except ServerRefused as error:
            self._can_sleep = False
            log.warning(
                "The vllm server keeps its memory between rollouts (start it with --enable-sleep-mode): %s",
                error,
            )
        else:
            self._asleep = set(SLEEP_TAGS)

    def _wake(self) -> None:
        self._wake_tags(SLEEP_TAGS)

    def _wake_tags(self, tags: Set[str]) -> None:
        needed = self._asleep & tags
        if needed:
            query = "&".join(f"tags={tag}" for tag in sorted(needed))
            self._client.request("POST", f"/wake_up?{query}")
            self._asleep -= needed

    def _rpc(self, method: str, *texts: str) -> list[object]:
        reply = self._client.request("POST", "/collective_rpc", {"method": method, "args": list(texts)})
        return list(reply["results"])

    def close(self) -> None:
        self._client.close()


def read_choices(reply: Mapping[str, Json], version: int) -> list[Completion]:
    """The completions in a reply of /v1/completions, in order."""
    completions = []
    if not reply["choices"]:
        raise ValueError("it has no choices")
    for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
        log_probs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        finish = choice["finish_reason"]
        error = None
        if finish not in ("stop", "length", "abort"):
            error = f"vLLM ended it: {finish}"
            finish = "error"
        completions.append(Completion(choice["token_ids"], log_probs, finish, version, error))
    return completions
