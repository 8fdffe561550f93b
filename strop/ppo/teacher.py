"""The teacher of an on-policy distillation: a frozen model in this process, on other machines, or behind the
URL of an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import http.client
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard, TypeVar, cast

import torch
from torch import Tensor

from strop.algorithms.distillation import forward_kl_topk
from strop.algorithms.kl import kl_limits, kl_penalty
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.backends.single import ModuleBackend
from strop.compat import Conventions
from strop.concurrency import call_each
from strop.config.derived import resource_pools
from strop.config.schema.distillation import TOPK, DistillationConfig
from strop.config.schema.ppo import PpoConfig
from strop.models.build import build_reference
from strop.ranks import Ranks
from strop.rewards.http import get_json, post_json
from strop.runtime.remote_models import RemoteReference
from strop.shared.build import BackendMaker
from strop.types import Batch, rows_of

GRACE = 1.0
"""Seconds after the timeout, for threads that end."""
LOG_PROBS = (-1e30, 0.01)
"""Between these a log-prob is one: finite in 32 bits, and above 0 by no more than rounding."""
MAX_ID = 2**31 - 1
"""Ids are kept in 32 bits."""
SECTION = "algorithm.distillation"
Result = TypeVar("Result")
TopTokens = list[tuple[int, float]]
"""Tokens of one position with their log-probs."""


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
        topk=config.algorithm.distillation.topk,
    )


def add_teacher_log_probs(
    batch: Batch, teacher: Backend, settings: DistillationConfig, micro: MicroBatching
) -> Batch:
    """Log-probs under the teacher, and its likeliest tokens where the loss needs them."""
    want = ["log_probs"]
    if settings.loss_mode == TOPK:
        want += ["top_ids", "top_log_probs"]
    found = teacher.forward(batch, want, micro)
    return batch.replace(
        teacher_log_probs=found.log_probs,
        teacher_top_ids=found.top_ids,
        teacher_top_log_probs=found.top_log_probs,
    )


def teacher_loss(
    settings: DistillationConfig, rules: Conventions, outputs: Outputs, micro: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence of the policy from the teacher, and what describes it, per token [B, T]."""
    own = outputs.log_probs
    teacher = micro.teacher_log_probs
    assert own is not None and teacher is not None
    tables = {"reverse_kl": own - teacher, "teacher_log_prob": teacher}
    if settings.loss_mode == TOPK:
        top, teacher_top = outputs.student_top_log_probs, micro.teacher_top_log_probs
        assert top is not None and teacher_top is not None
        divergence = forward_kl_topk(top, teacher_top, min_log_prob=settings.log_prob_min_clamp)
        tables["student_mass"] = top.exp().sum(-1)
        tables["teacher_mass"] = teacher_top.masked_fill(top.isneginf(), -torch.inf).exp().sum(-1)
    else:
        limits = kl_limits(settings.loss_mode, rules)
        divergence = kl_penalty(own, teacher, estimator=settings.loss_mode, **limits)
    if settings.loss_max_clamp is not None:
        divergence = divergence.clamp(-settings.loss_max_clamp, settings.loss_max_clamp)
    return divergence, tables


class TeacherServer:
    """Log-probs of sequences from a server: it gets token ids, generates one token, which is thrown away, and
    says how likely it finds each token of the prompt.

    vLLM answers in `prompt_logprobs`, servers with OpenAI's `echo` in `logprobs.token_logprobs`. Both are
    asked for. The likeliest tokens of each position are in vLLM's form only: the other one has no token ids.
    All ranks hold the same batch, so rank 0 asks and broadcasts.
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
        """Log-probs of the response tokens, and the likeliest tokens where wanted, on every rank."""
        assert set(want) <= {"log_probs", "top_ids", "top_log_probs"}, want
        count = self.settings.topk if "top_ids" in want else 0
        return self._on_rank0(lambda: self._outputs(batch, count))

    def _on_rank0(self, call: Callable[[], Result]) -> Result:
        """What `call` returns on rank 0, on all ranks. A failure is raised on all of them."""

        def on_rank0() -> Result | None:
            return call() if self.ranks.is_rank0 else None

        found = self.ranks.run_or_raise_on_all(on_rank0, f"asking the teacher ({SECTION}.url)")
        return cast(Result, self.ranks.broadcast_object(found))

    def _outputs(self, batch: Batch, count: int) -> Outputs:
        sequences = [sequence.tolist() for sequence in batch.sequences]
        replies = call_each(
            partial(self._rate, count=count),
            sequences,
            workers=self.settings.max_concurrent,
            timeout=self.settings.timeout + GRACE,
        )
        rows: list[list[float]] = []
        top_ids = torch.zeros(*batch.mask.shape, count, dtype=torch.int32)
        top_log_probs = torch.zeros(*batch.mask.shape, count)
        for row, (prompt_length, reply) in enumerate(
            zip(batch.prompt_lengths.tolist(), replies, strict=True)
        ):
            if isinstance(reply, Exception):
                raise reply
            log_probs, top = reply
            rows.append(log_probs[prompt_length:])
            if count and len(top) > prompt_length:
                both = torch.tensor(top[prompt_length:], dtype=torch.float64)  # exact for ids, too
                top_ids[row, : len(both)] = both[..., 0].int()
                top_log_probs[row, : len(both)] = both[..., 1].float()
        found = Outputs(log_probs=rows_of(rows, batch.mask.shape[1]))
        if count:
            found.top_ids = top_ids
            found.top_log_probs = top_log_probs
        return found

    def _rate(self, ids: list[int], count: int) -> tuple[list[float], list[TopTokens]]:
        """The log-prob of each token of a sequence, 0 for the first, which has no context; and the `count`
        likeliest tokens at the place of each."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": count,
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
        return parse_log_probs(reply, ids, url), parse_top_tokens(reply, ids, count, url)

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
        if not _is_log_prob(value):
            raise ValueError(
                f"The teacher {url} gave {value!r} as log-prob of token {ids[place]} at position {place}. "
                "Has it the tokenizer of the policy?"
            )
        found.append(value)
    return found


def _is_log_prob(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and LOG_PROBS[0] < value < LOG_PROBS[1]


def parse_top_tokens(reply: object, ids: Sequence[int], count: int, url: str) -> list[TopTokens]:
    """The `count` likeliest tokens at the place of each token of `ids`, the likeliest first; zeros at the
    first place, which has no context."""
    if not count:
        return []
    known = _first_choice(reply).get("prompt_logprobs")
    entries: list[object] = known if isinstance(known, list) else []
    found: list[TopTokens] = [[(0, 0.0)] * count]
    for place in range(1, len(ids)):
        pairs = _pairs(entries[place]) if place < len(entries) else []
        if len(pairs) < count:
            raise ValueError(
                f"The teacher {url} gave {len(pairs)} tokens with log-probs at position {place}, and "
                f"{SECTION}.topk={count} are wanted. It must be vLLM with --max-logprobs {count} or more; or "
                f"lower topk, or set {SECTION}.loss_mode=k3."
            )
        found.append(sorted(pairs, key=lambda pair: -pair[1])[:count])
    return found


def _pairs(entry: object) -> TopTokens:
    """The tokens in vLLM's entry of a position that can be read."""
    pairs: TopTokens = []
    for token, fact in entry.items() if isinstance(entry, dict) else ():
        value = fact.get("logprob") if isinstance(fact, dict) else fact
        if str(token).isdecimal() and int(token) <= MAX_ID and _is_log_prob(value):
            pairs.append((int(token), value))
    return pairs


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
