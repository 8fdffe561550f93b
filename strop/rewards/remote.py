"""A reward server that speaks OpenRLHF's protocol.

    POST {"query": [prompt and response, special tokens included], "prompts": [...], "labels": [ground truths]}
    -> {"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}      the last two are optional

Samples are divided over the servers. A request that fails is sent again, to the next server, until its time is up; one that a
server finds too large is sent in halves.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.rewards.calls import call_each
from strop.rewards.post import PAUSE, TRIES, TooLarge, post_json
from strop.rewards.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TEXTS = 128  # in one request: servers limit its size, and batch over requests anyway
GRACE = 1.0  # a server that answers byte by byte is cut off this much after the limit


class RemoteModel:
    """Scores of one or more servers, as a reward manager gives them."""

    def __init__(
        self,
        urls: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout: float = 300.0,
        workers: int = 1,
        tries: int = TRIES,
        pause: float = PAUSE,
    ):
        """At most `workers` requests at a time, or one per server if there are more; `timeout` is for one request."""
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        for url in self.urls or [""]:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"reward_model.remote_url has {url!r}, which is not an http:// or https:// address. A Python file goes to "
                    "custom_reward_function.path."
                )
        self.tokenizer, self.timeout, self.tries, self.pause = tokenizer, timeout, tries, pause
        self.workers = max(workers, len(self.urls))
        self.retried = 0
        """Requests that were sent again, over all calls."""
        self._lock = threading.Lock()
        self._turn = itertools.cycle(range(len(self.urls)))

    def score(self, samples: Sequence[Sample]) -> list[Any]:
        if not samples:
            return []
        size = min(MOST_TEXTS, -(-len(samples) // self.workers))
        pieces = [samples[start : start + size] for start in range(0, len(samples), size)]
        answers = call_each(self._ask, pieces, workers=self.workers, timeout=self.timeout + GRACE)
        return [
            value
            for piece, answer in zip(pieces, answers, strict=True)
            for value in ([answer] * len(piece) if isinstance(answer, Exception) else answer)
        ]

    def _ask(self, samples: Sequence[Sample], deadline: float | None = None) -> list[Any]:
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        try:
            reply, url = post_json(
                self._next_url,
                self._question(samples),
                what="reward server",
                timeout=deadline - time.monotonic(),
                tries=self.tries,
                pause=self.pause,
                on_retry=self._count_retry,
            )
        except TooLarge:
            if len(samples) == 1:
                raise
            return self._ask_halves(samples, deadline)
        return values_in(reply, len(samples), url)

    def _ask_halves(self, samples: Sequence[Sample], deadline: float) -> list[Any]:
        answers: list[Any] = []
        for half in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
            try:
                answers += self._ask(half, deadline)
            except (OSError, ValueError) as error:  # one text that is too large by itself must not cost the others
                answers += [error] * len(half)
        return answers

    def _next_url(self) -> str:
        with self._lock:
            return self.urls[next(self._turn)]

    def _count_retry(self) -> None:
        with self._lock:
            self.retried += 1

    def _question(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        prompts = [sample.trajectory.prompt.ids for sample in samples]
        whole = [ids + sample.trajectory.response for ids, sample in zip(prompts, samples)]
        return {
            "query": self.tokenizer.batch_decode(whole, skip_special_tokens=False),
            "prompts": self.tokenizer.batch_decode(prompts, skip_special_tokens=False),
            "labels": [sample.ground_truth for sample in samples],
        }


def values_in(reply: Any, count: int, url: str) -> list[Any]:
    """What a server's reply says about each of `count` samples: a number, or a dict where it says more than that."""
    if not isinstance(reply, dict) or "rewards" not in reply:
        keys = ", ".join(map(str, reply)) if isinstance(reply, dict) else type(reply).__name__
        raise ValueError(f"The reward server {url} answered without 'rewards' (it sent: {keys or 'nothing'}).")
    columns = {"score": _column(reply["rewards"], count)}
    if len(columns["score"]) != count:
        raise ValueError(f"The reward server {url} was sent {count} samples and answered with {len(columns['score'])} rewards.")
    more = {"scores": reply.get("scores"), **(reply.get("extra_logs") or {})}
    for name, value in more.items():
        column = _column(value, count)
        if value is not None and len(column) == count and name != "score":
            columns[name] = column
    if columns.get("scores") == columns["score"]:
        del columns["scores"]
    if len(columns) == 1:
        return columns["score"]
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _column(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * count
