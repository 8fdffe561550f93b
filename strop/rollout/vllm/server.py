"""vLLM as a server of this machine, started by the user with our extension (docs/rollout_engines.md has the command).

Prompts and answers travel as token ids over the OpenAI-compatible completions interface; weights by name of a file in shared
memory, over the development interface (VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Set
from concurrent.futures import Future
from typing import Any

from strop.rollout.base import Completion, Request, Sampling, failed
from strop.rollout.http import JsonClient, Refused
from strop.rollout.vllm.driver import SLEEPERS

log = logging.getLogger(__name__)


class Server:
    """Takes what Driver takes, and asks a server."""

    def __init__(self, url: str, seeded: bool = False) -> None:
        self._client = JsonClient("vllm", url)
        self._seeded = seeded
        self._version = 0
        self._can_sleep, self._asleep = True, set[str]()
        try:
            card = self._client.ask("GET", "/v1/models")["data"][0]
            self._model: str = card["id"]
            self.longest: int = card["max_model_len"]
            self.log_probs: str = self._rpc("strop_prepare")[0]
        except Refused as error:
            self._client.close()
            raise ValueError(
                f"The vllm server at {url} cannot be trained with: {error}. Start it with VLLM_SERVER_DEV_MODE=1 and "
                "--worker-extension-cls strop.rollout.vllm.extension.Extension."
            ) from error

    def ask(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        answer: Future[list[Completion]] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                found = read_choices(done.result(), self._version)
                answer.set_result([copy.deepcopy(found[i % len(found)]) for i in range(request.n)])
            elif isinstance(error, Refused):
                answer.set_result(failed(request, str(error), self._version))
            else:
                answer.set_exception(error)

        body = self._body(request, sampling)
        self._client.send("POST", "/v1/completions", body).add_done_callback(settle)
        return answer

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        seed = {"seed": (request.seed + request.first) % (1 << 63)} if self._seeded and request.seed is not None else {}
        return {
            "model": self._model,
            "prompt": list(request.ids),
            "n": request.n if sampling.temperature > 0 else 1,  # the server refuses to be greedy several times
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_ids),
            "ignore_eos": True,  # what ends a completion is in stop_ids
            "logprobs": 0,
            "return_token_ids": True,
            **seed,
        }

    def call(self, what: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(getattr(self, f"_{what}")(*arguments))
        except (ValueError, OSError) as error:
            answer.set_exception(error)
        return answer

    def _load(self, contents: str, version: int | None) -> None:
        self._rouse({"weights"})
        self._rpc("strop_load", contents)
        if version is not None:
            self._client.ask("POST", "/reset_prefix_cache?reset_running_requests=true")
            self._version = version

    def _stamp(self, version: int) -> None:
        self._version = version

    def _abort(self) -> None:
        try:
            self._client.ask("POST", "/abort_requests", {})
        except Refused:  # older servers end requests only by a pause
            self._client.ask("POST", "/pause?mode=abort")
            self._client.ask("POST", "/resume")

    def _sleep(self) -> None:
        if not self._can_sleep:
            return
        try:
            self._client.ask("POST", "/sleep?level=1")
        except Refused as error:
            self._can_sleep = False
            log.warning("The vllm server keeps its memory between rollouts (start it with --enable-sleep-mode): %s", error)
        else:
            self._asleep = set(SLEEPERS)

    def _wake(self) -> None:
        self._rouse(SLEEPERS)

    def _rouse(self, parts: Set[str]) -> None:
        needed = self._asleep & parts
        if needed:
            self._client.ask("POST", "/wake_up?" + "&".join(f"tags={part}" for part in sorted(needed)))
            self._asleep -= needed

    def _rpc(self, method: str, *texts: str) -> list[Any]:
        found = self._client.ask("POST", "/collective_rpc", {"method": method, "args": list(texts)})
        return list(found["results"])

    def close(self) -> None:
        self._client.close()


def read_choices(reply: dict[str, Any], version: int) -> list[Completion]:
    """Completions of an answer of /v1/completions, in order."""
    found = []
    for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
        ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        finish = choice["finish_reason"]
        if finish not in ("stop", "length", "abort"):
            found.append(Completion(ids, log_probs, "error", version, f"vLLM ended it: {finish}"))
        else:
            found.append(Completion(ids, log_probs, finish, version))
    return found
