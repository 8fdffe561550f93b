"""Scores in OpenRLHF's form: a client of its reward servers, and its reward functions in this process.

    POST {"query": [prompt and response with special tokens], "prompts": [...], "labels": [ground truths]}
    -> {"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}      the last two are optional

Samples are distributed over the servers. A request that fails is sent again, to the next server, until it
times out, so a server may restart; one that a server finds too large is split in two.

A Python file in the place of an address has `reward_func(queries, prompts, labels)` with the same lists. It
returns the same mapping, or the rewards alone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.concurrency import call_each
from strop.registry import load_attribute
from strop.rewards.base import RewardSample
from strop.rewards.http import MAX_FAULTS, PAUSE, RequestTooLarge, post_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEXTS_PER_REQUEST = 128  # servers limit the size of a request, and batch over requests anyway
GRACE = 1.0  # seconds after the timeout, for a server that answers byte by byte


class RewardServerClient:
    """Scores samples with one or more reward servers; it is used like a reward manager."""

    def __init__(
        self,
        urls: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout: float = 300.0,
        workers: int = 1,
        max_faults: int = MAX_FAULTS,
        pause: float = PAUSE,
    ):
        """At most `workers` concurrent requests, but at least one per server; `timeout` is for one
        request, retries included."""
        if isinstance(urls, str):
            urls = [urls]
        self.urls = list(urls)
        for url in self.urls or [""]:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"reward_model.remote_url has {url!r}, which is not an http:// or https:// address. A "
                    "Python file goes to custom_reward_function.path."
                )
        self.tokenizer = tokenizer
        self.timeout = timeout
        self.max_faults = max_faults
        self.pause = pause
        self.workers = max(workers, len(self.urls))
        self.retried = 0
        """Requests that were sent again, over all calls."""
        self._lock = threading.Lock()
        self._url_indices = itertools.cycle(range(len(self.urls)))

    def score(self, samples: Sequence[RewardSample]) -> list[object]:
        if not samples:
            return []
        size = min(MAX_TEXTS_PER_REQUEST, -(-len(samples) // self.workers))
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        replies = call_each(self._request, chunks, workers=self.workers, timeout=self.timeout + GRACE)
        values: list[object] = []
        for chunk, reply in zip(chunks, replies, strict=True):
            if isinstance(reply, Exception):
                values += [reply] * len(chunk)
            else:
                values += reply
        return values

    def _request(self, samples: Sequence[RewardSample], deadline: float | None = None) -> list[object]:
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        try:
            reply, url = post_json(
                self._next_url,
                request_of(samples, self.tokenizer),
                what="reward server",
                timeout=deadline - time.monotonic(),
                max_faults=self.max_faults,
                pause=self.pause,
                on_retry=self._count_retry,
            )
        except RequestTooLarge:
            if len(samples) == 1:
                raise
            return self._request_halves(samples, deadline)
        return parse_reply(reply, len(samples), url)

    def _request_halves(self, samples: Sequence[RewardSample], deadline: float) -> list[object]:
        middle = len(samples) // 2
        values: list[object] = []
        for half in (samples[:middle], samples[middle:]):
            try:
                values += self._request(half, deadline)
            except (OSError, ValueError) as error:  # one oversized text must not fail the other samples
                values += [error] * len(half)
        return values

    def _next_url(self) -> str:
        with self._lock:
            return self.urls[next(self._url_indices)]

    def _count_retry(self) -> None:
        with self._lock:
            self.retried += 1


class RewardFile:
    """Scores samples with the function `reward_func` of a file; it is used like a reward manager."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, *, timeout: float = 300.0):
        """`timeout` is per sample."""
        self.path = path
        self.function = load_attribute(path, "reward_func")
        self.tokenizer = tokenizer
        self.timeout = timeout

    def score(self, samples: Sequence[RewardSample]) -> list[object]:
        if not samples:
            return []
        [values] = call_each(self._call, [samples], timeout=self.timeout * len(samples))
        if isinstance(values, Exception):
            return [values] * len(samples)
        return values

    def _call(self, samples: Sequence[RewardSample]) -> list[object]:
        asked = request_of(samples, self.tokenizer)
        found = _plain(self.function(asked["query"], asked["prompts"], asked["labels"]))
        if not isinstance(found, dict):
            found = {"rewards": found}
        return parse_reply(found, len(samples), self.path)


def request_of(
    samples: Sequence[RewardSample], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Sequence[object]]:
    """The texts and ground truths of samples, as OpenRLHF's scorers get them."""
    prompts = [sample.trajectory.prompt.ids for sample in samples]
    conversations = [ids + sample.trajectory.response for ids, sample in zip(prompts, samples)]
    return {
        "query": tokenizer.batch_decode(conversations, skip_special_tokens=False),
        "prompts": tokenizer.batch_decode(prompts, skip_special_tokens=False),
        "labels": [sample.ground_truth for sample in samples],
    }


def _plain(value: object) -> object:
    """Tensors and arrays inside a result as numbers and lists."""
    if isinstance(value, dict):
        return {name: _plain(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def parse_reply(reply: object, count: int, url: str) -> list[object]:
    """Return what the reply says about each of `count` samples: a number, or a dict if there are extra
    logs."""
    if not isinstance(reply, dict):
        raise _no_rewards(url, type(reply).__name__)
    if "rewards" not in reply:
        raise _no_rewards(url, ", ".join(map(str, reply))[:200] or "nothing")
    rewards = _column(reply["rewards"], 1)  # one number stands for one sample, never for several
    if len(rewards) != count:
        raise ValueError(f"{url} was sent {count} samples and answered with {len(rewards)} rewards.")
    columns = {"score": rewards}
    extra = reply.get("extra_logs") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"{url} answered with extra_logs of type {type(extra).__name__}.")
    logs = {"scores": reply.get("scores"), **extra}
    for name, value in logs.items():
        column = _column(value, count)
        if value is not None and len(column) == count and name != "score":
            columns[name] = column
    if columns.get("scores") == rewards:
        del columns["scores"]
    if len(columns) == 1:
        return rewards
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _no_rewards(url: str, sent: str) -> ValueError:
    return ValueError(f"{url} answered without 'rewards' (it sent: {sent}).")


def _column(value: object, count: int) -> list[object]:
    if isinstance(value, list):
        return value
    return [value] * count
