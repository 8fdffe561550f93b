"""Earlier answers by prompt, to guess later answers from. On the host.

It lives as long as the engine and is not saved: it changes the speed of a run, not its tokens.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from strop.rollout.native.requests import prefix_hashes
from strop.rollout.native.speculation.propose import NO_TOKEN

_TOKEN_BYTES = 4
_MAX_REQUESTS = 1 << 14


@dataclass(eq=False)
class PromptMemory:
    """The answers to one prompt, the newest last. A conversation, or an answer that was interrupted and
    continued, counts as an answer to the prompt that it began with."""

    prompt_length: int
    context: Sequence[int]
    """The end of the prompt, so that the first tokens of an answer are found."""
    answers: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    """Of all answers."""
    version: int = 0
    """Grows with every change."""
    _line: tuple[int, int, np.ndarray] | None = None

    def line(self, width: int) -> np.ndarray:
        """The newest answers in at most `width` tokens, with separators."""
        if self._line is None or self._line[:2] != (self.version, width):
            self._line = (self.version, width, self._joined(width))
        return self._line[2]

    def _joined(self, width: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        room = width
        separator = np.array([NO_TOKEN], dtype=np.int32)
        context = np.array(self.context, dtype=np.int32)
        for answer in reversed(self.answers):
            part = np.concatenate([context, answer, separator])[:room]
            parts.append(part)
            room -= len(part)
            if room <= 0:
                break
        return np.concatenate([separator[:0], *reversed(parts)])


class DraftMemory:
    def __init__(self, *, max_bytes: int, max_tokens: int, context: int) -> None:
        """`max_bytes` of all answers; `max_tokens` of the answers to one prompt, except that the newest
        answer is always kept; `context`: tokens of the prompt that are kept with them."""
        self._max_tokens_of_all = max_bytes // _TOKEN_BYTES
        self._max_tokens = max_tokens
        self._context = context
        self._prompts: OrderedDict[int, PromptMemory] = OrderedDict()
        """By hash of the prompt, the longest unchanged first."""
        self._lengths: Counter[int] = Counter()
        """Lengths of these prompts."""
        self._sorted_lengths: list[int] = []
        self._by_request: dict[int, int | None] = {}
        """What `_key` found, so that a prompt is hashed once."""
        self.num_tokens = 0

    def find(self, request: int, prompt: Sequence[int]) -> PromptMemory | None:
        """What is known of a prompt. `request`: a number that only this prompt has."""
        key = self._key(request, prompt)
        if key is None:
            return None
        return self._prompts.get(key)

    def add(self, request: int, prompt: Sequence[int], answer: Sequence[int] | np.ndarray) -> None:
        """Remember an answer, and forget those that were not needed for the longest time. It is called for
        every answer, also where nothing is ever guessed, so it does little."""
        if not len(answer):
            return
        key = self._by_request.get(request)
        if key is None or key not in self._prompts:
            key = self._key(request, prompt)
        if key is None or key not in self._prompts:
            key = int(prefix_hashes(prompt)[-1])
            self._by_request[request] = key
        known = self._prompts.get(key)
        if known is None:
            known = self._prompts[key] = PromptMemory(len(prompt), prompt[-self._context :])
            self._add_length(len(prompt))
        self._prompts.move_to_end(key)
        before = known.num_tokens
        whole = np.asarray(answer, dtype=np.int32)
        if len(prompt) > known.prompt_length:
            # The earlier turns of the same conversation are its beginning.
            whole = np.concatenate([np.array(prompt[known.prompt_length :], dtype=np.int32), whole])
            known.answers = [old for old in known.answers if not np.array_equal(whole[: len(old)], old)]
            known.num_tokens = sum(map(len, known.answers))
        known.answers.append(whole)
        known.num_tokens += len(whole)
        while len(known.answers) > 1 and known.num_tokens > self._max_tokens:
            known.num_tokens -= len(known.answers.pop(0))
        known.version += 1
        self.num_tokens += known.num_tokens - before
        while self.num_tokens > self._max_tokens_of_all and self._prompts:
            _, gone = self._prompts.popitem(last=False)
            self._drop_length(gone.prompt_length)
            self.num_tokens -= gone.num_tokens

    def _add_length(self, length: int) -> None:
        self._lengths[length] += 1
        if self._lengths[length] == 1:
            insort(self._sorted_lengths, length)

    def _drop_length(self, length: int) -> None:
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
            self._sorted_lengths.remove(length)

    def _key(self, request: int, prompt: Sequence[int]) -> int | None:
        """The key of the prompt, or of the longest known prompt that it continues."""
        if request in self._by_request:
            return self._by_request[request]
        if len(self._by_request) >= _MAX_REQUESTS:
            self._by_request.clear()
        lengths = self._sorted_lengths[: bisect(self._sorted_lengths, len(prompt))]
        keys: list[int] = []
        if lengths:
            keys = prefix_hashes(prompt)[np.array(lengths) - 1].tolist()
        for length, key in zip(reversed(lengths), reversed(keys)):
            if key in self._prompts and self._prompts[key].prompt_length == length:
                self._by_request[request] = key
                return key
        self._by_request[request] = None
        return None
