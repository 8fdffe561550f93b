"""The teacher of an on-policy distillation: a frozen model in this process, on other machines, or behind the
URL of an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import http.client
import math
import os
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from strop.backends.base import MicroBatching, Outputs
from strop.backends.single import ModuleBackend
from strop.concurrency import call_each
from strop.config.derived import resource_pools
from strop.config.schema.distillation import DistillationConfig
from strop.config.schema.ppo import PpoConfig
from strop.models.build import build_reference
from strop.ranks import Ranks
from strop.rewards.http import get_json, post_json
from strop.runtime.remote_models import RemoteReference
from strop.shared.build import BackendMaker
from strop.types import Batch, rows_of

GRACE = 1.0
"""Seconds after the timeout, for threads that end."""
SECTION = "algorithm.distillation"
Result = TypeVar("Result")


def build_teacher(config: PpoConfig, make: BackendMaker) -> RemoteReference | ModuleBackend | TeacherServer:
    """The teacher that the configuration names."""
    settings = config.algorithm.distillation
    if settings.url:
        return TeacherServer(settings, make.ranks)
    if "teacher" in resource_pools(config):
        from strop.runtime.ray.model_actors import RayModelCopies

        key = f"{SECTION}.nnodes"
        return RemoteReference(RayModelCopies("teacher", key), make.ranks, f"teacher ({key})")
    return local_teacher(config, make)


def local_teacher(config: PpoConfig, make: BackendMaker) -> ModuleBackend:
    """The frozen teacher in this process, or sharded over the ranks of `make`."""
    ref = config.actor_rollout_ref.ref
    model = dataclasses.replace(
        config.actor_rollout_ref.model,
        path=config.algorithm.distillation.path,
        hf_config_path=None,
        lora_rank=0,
        lora_adapter_path=None,
    )
    return make(
        build_reference,
        model,
        ref.fsdp_config,
        ref.strategy,
        sequence_parallel=ref.ulysses_sequence_parallel_size,
        tensor_parallel=ref.tensor_parallel_size,
    )


class TeacherServer:
    """Log-probs of sequences from a server: it gets token ids, generates one token, which is thrown away, and
    says how likely it finds each token of the prompt.

    vLLM answers in `prompt_logprobs`, servers with OpenAI's `echo` in `logprobs.token_logprobs`. Both are
    asked for. All ranks hold the same batch, so rank 0 asks and broadcasts.
    """

    def __init__(self, settings: DistillationConfig, ranks: Ranks) -> None:
        url = str(settings.url).rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{SECTION}.url={settings.url} is not an http:// or https:// address.")
        self.base_url = url.removesuffix("/completions")
        self.settings = settings
        self.ranks = ranks
        self.headers: dict[str, str] = {}
        key = os.environ.get(settings.api_key_env, "")
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.model = settings.model or self._on_rank0(self._first_model)

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        """Log-probs of the response tokens, on every rank."""
        assert list(want) == ["log_probs"], "a server knows log-probs only"
        return Outputs(log_probs=self._on_rank0(lambda: self._log_probs(batch)))

    def _on_rank0(self, call: Callable[[], Result]) -> Result:
        """What `call` returns on rank 0, on all ranks. A failure is raised on all of them."""

        def on_rank0() -> Result | None:
            return call() if self.ranks.is_rank0 else None

        found = self.ranks.run_or_raise_on_all(on_rank0, f"asking the teacher ({SECTION}.url)")
        return cast(Result, self.ranks.broadcast_object(found))

    def _log_probs(self, batch: Batch) -> torch.Tensor:
        sequences = [sequence.tolist() for sequence in batch.sequences]
        replies = call_each(
            self._sequence_log_probs,
            sequences,
            workers=self.settings.max_concurrent,
            timeout=self.settings.timeout + GRACE,
        )
        rows: list[list[float]] = []
        for prompt_length, reply in zip(batch.prompt_lengths.tolist(), replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            rows.append(reply[prompt_length:])
        return rows_of(rows, batch.mask.shape[1])

    def _sequence_log_probs(self, ids: list[int]) -> list[float]:
        """The log-prob of each token of a sequence; 0 for the first, which has no context."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "echo": True,
            "logprobs": 1,
        }
        reply, url = post_json(
            lambda: f"{self.base_url}/completions",
            body,
            what="teacher",
            timeout=self.settings.timeout,
            headers=self.headers,
        )
        return parse_log_probs(reply, ids, url)

    def _first_model(self) -> str:
        timeout = min(self.settings.timeout, 30.0)
        try:
            reply = get_json(f"{self.base_url}/models", self.headers, timeout=timeout)
            return str(reply["data"][0]["id"])  # type: ignore[index] # checked by the except below
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"The teacher at {SECTION}.url={self.settings.url} does not say which models it has "
                f"({type(error).__name__}: {error}). Is it running? Name one in {SECTION}.model."
            ) from error


def parse_log_probs(reply: object, ids: Sequence[int], url: str) -> list[float]:
    """The log-probs of the tokens `ids` in the reply to a completion of them."""
    choice = _first_choice(reply)
    known = choice.get("prompt_logprobs")
    if isinstance(known, list):
        values = [_of_token(entry, token) for entry, token in zip(known, ids)]
    else:
        logprobs = choice.get("logprobs")
        values = list(logprobs.get("token_logprobs") or []) if isinstance(logprobs, dict) else []
        values = values[: len(ids)]
    if len(values) < len(ids):
        raise ValueError(
            f"The teacher {url} gave log-probs for {len(values)} of {len(ids)} prompt tokens. It must be a "
            "server with prompt_logprobs (vLLM) or with echo and logprobs."
        )
    found = [0.0]
    for place, value in enumerate(values[1:], 1):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"The teacher {url} gave {value!r} as log-prob of token {ids[place]} at position {place}. "
                "Has it the tokenizer of the policy?"
            )
        found.append(float(value))
    return found


def _first_choice(reply: object) -> dict[str, object]:
    if isinstance(reply, dict):
        choices = reply.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            return choices[0]
    return {}


def _of_token(entry: object, token: int) -> object:
    """vLLM's entry of a position: {"17": {"logprob": -0.3, ...}}; None for the first."""
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    return found.get("logprob") if isinstance(found, dict) else found
