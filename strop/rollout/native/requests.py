"""Requests in the native engine, and their samples as the scheduler sees them: waiting, running, admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from strop.rollout.base import Completion, Request, Sampling, error_completions
from strop.rollout.native.images import PromptImages

Listener = Callable[[list[int], list[float]], None]
BLOCK = 16
"""Tokens per hash of a prefix."""
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
_ADAPTER_BASE = 0xD6E8FEB86659FD93


@cache
def _powers(size: int) -> np.ndarray:
    return np.cumprod(np.full(size, _HASH_BASE), dtype=np.uint64)


def prefix_hashes(tokens: Sequence[int]) -> np.ndarray:
    """Hashes of the first 1, 2, 3 ... tokens."""
    powers = _powers(1 << len(tokens).bit_length())[: len(tokens)]
    values = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    return np.cumsum(values * powers, dtype=np.uint64)


def block_hashes(tokens: Sequence[int], adapter: int = 0) -> list[int]:
    """Hashes of the first 16, 32, 48 ... tokens, under one adapter."""
    sums = prefix_hashes(tokens[: len(tokens) // BLOCK * BLOCK])[BLOCK - 1 :: BLOCK]
    hashes: list[int] = (sums + np.uint64(adapter * _ADAPTER_BASE % (1 << 64))).tolist()
    return hashes


@dataclass(eq=False)
class CachedPrefix:
    """A row whose first positions hold the keys and values of `tokens`."""

    row: int
    tokens: Sequence[int]
    multi_turn: bool = False
    """It is a conversation, which may continue."""
    last_used: int = 0
    adapter: int = 0
    """The adapter that computed them: see ScheduledSample."""
    indexed: bool = False
    """It can be found."""

    @cached_property
    def hashes(self) -> list[int]:
        """Of the first 16, 32, 48 ... tokens, under the adapter."""
        return block_hashes(self.tokens, self.adapter)


@dataclass(eq=False)
class RequestState:
    """A request in the engine, and its completions so far."""

    number: int
    request: Request
    on_done: Callable[[RequestState], None] | None = None
    error: BaseException | None = None
    """Why it failed; completions are missing then."""
    _completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return max(1, self.request.n)

    @property
    def complete(self) -> bool:
        """All samples have finished."""
        return len(self._completions) == self.count

    @property
    def done(self) -> bool:
        """Complete or failed."""
        return self.error is not None or self.complete

    def add(self, index: int, completion: Completion) -> None:
        """A sample has finished."""
        was_done = self.done
        self._completions[index] = completion
        self._notify(was_done)

    def refuse(self, reason: str, version: int) -> None:
        """Every sample of the request fails alone, with a reason."""
        for index, completion in enumerate(error_completions(self.request, reason, version)):
            self.add(index, completion)

    def fail(self, error: BaseException) -> None:
        """The request has failed; the first error is kept."""
        was_done = self.done
        self.error = self.error or error
        self._notify(was_done)

    def _notify(self, was_done: bool) -> None:
        if was_done or not self.done:
            return
        if self.on_done is not None:
            self.on_done(self)
        if self.request.on_done is not None:
            self.request.on_done()

    def result(self) -> list[Completion]:
        """The completions in order. Raises the error of a failed request."""
        if self.error is not None:
            raise self.error
        assert self.complete
        return [self._completions[index] for index in range(self.count)]


def listener(request: Request, index: int, on_error: Callable[[Exception], None]) -> Listener | None:
    """Calls `request.on_tokens` with new tokens of sample `index`; None: the request wants no stream."""
    on_tokens = request.on_tokens
    if on_tokens is None:
        return None

    def listen(ids: list[int], log_probs: list[float]) -> None:
        try:
            on_tokens(index, ids, log_probs)
        except Exception as error:  # noqa: BLE001 - a failing callback fails only its request
            on_error(error)

    return listen


@dataclass(eq=False)
class ScheduledSample:
    """One completion that is waiting or running."""

    request: int
    """Number of the request; its samples have the same prompt."""
    index: int
    prompt: Sequence[int]
    limit: int
    """Limit of tokens, prompt included."""
    settings: Sampling = Sampling()
    stream: int = 0
    """Its random stream."""
    listener: Listener | None = None
    """Called with new tokens and their log-probs."""
    multi_turn: bool = False
    """It is a turn of a conversation, which may continue."""
    adapter: int = 0
    """The load of a LoRA adapter that samples it, 0: none. Keys and values of different adapters, and of
    different loads of one adapter, are never shared."""
    images: PromptImages | None = None
    """The images of the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Sampled tokens when they were last read from the device."""
    packed: np.ndarray | None = None
    """The same as an array, if they were read."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Weights that sampled `tokens`: spans (version, number of tokens)."""
    num_streamed: int = 0
    """Sampled tokens that the listener already has."""
    prefix: CachedPrefix | None = None
    """How other sequences find its row; None if another row with the same tokens is found instead."""
    decode_prefill_len: int = 0
    """Length of a sequence that decode steps prefill (see Admission.decode_prefill), else 0. When it is
    longer, all of these tokens are computed."""
    order: int | None = None
    """Its number in the order of first admissions."""
    preempted: bool = False
    """It was preempted and not admitted since."""
    experts: np.ndarray | None = None
    """Of its tokens but the newest when they were last read, if the engine records them."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def prefix_keys(self) -> list[int]:
        """The sequence for the prefix cache, in which tokens of different images differ."""
        if self.images is None:
            return self.sequence
        return [*self.images.keys, *self.tokens]

    def stream_new_tokens(self) -> None:
        """Give the listener what it does not have yet."""
        if self.listener is not None and len(self.tokens) > self.num_streamed:
            start = self.num_streamed
            self.num_streamed = len(self.tokens)
            self.listener(self.tokens[start:], self.log_probs[start:])

    @property
    def image_end(self) -> int:
        """The position behind the last image token."""
        return 0 if self.images is None else self.images.end


@dataclass(frozen=True)
class RowPlacement:
    """Memory for a sequence of `length` tokens in `row`, the first `num_shared` of which are those of row
    `source`."""

    row: int
    length: int
    source: int | None = None
    num_shared: int = 0
    source_is_new: bool = False
    """The source is placed by the same call and computed later; else it is a row before that call."""


@dataclass(frozen=True)
class Admission:
    """An admitted sample. The part of its sequence that is not cached is computed."""

    sample: ScheduledSample
    row: int
    source_row: int | None = None
    """A row with the same first `num_cached_tokens` tokens; its keys and values are copied."""
    num_cached_tokens: int = 0
    second_pass: bool = False
    """Its source row, or that of the row it duplicates, is admitted at the same time and computed first."""
    duplicate_of: int | None = None
    """A row admitted at the same time with exactly the same tokens; it also shares its logits."""
    decode_prefill: bool = False
    """So few tokens are not cached that decode steps compute them: the steps feed it the next token of its
    sequence instead of sampling one."""
    snapshot: int | None = None
    """The slot with the states after the cached tokens, of a model with states."""
    keeps_states: bool = False
    """Other sequences may begin with the same tokens: the states before the last one are kept."""

    @property
    def placement(self) -> RowPlacement:
        """What the cache has to do for it."""
        length = self.sample.length
        if self.duplicate_of is not None:
            return RowPlacement(self.row, length, self.duplicate_of, length, source_is_new=True)
        return RowPlacement(self.row, length, self.source_row, self.num_cached_tokens, self.second_pass)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start ..` of the sequence in a row, computed in one forward pass."""

    row: int
    start: int
    tokens: Sequence[int]
    slot: int | None = None
    """Where the states before its last token are kept."""
    images: PromptImages | None = None
    """Those of its prompt."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def reach(self) -> Tensor | None:
        """The last positions that its tokens see; None: their own."""
        return None if self.images is None else self.images.reach_of(self.start, self.end)

    def room(self, tokens: int) -> int:
        """How many tokens, of at most `tokens`, may be computed before the others: none sees later ones."""
        reach = self.reach
        if reach is None:
            return tokens
        ends = (reach.cummax(0).values == torch.arange(self.start, self.end)).nonzero().flatten() + 1
        return int(ends[ends <= tokens].max()) if len(ends) and int(ends[0]) <= tokens else 0

    def split(self, tokens: int) -> tuple[PrefillChunk, PrefillChunk]:
        """The first `tokens` tokens, and the others."""
        begin = replace(self, tokens=self.tokens[:tokens], slot=None)
        return begin, replace(self, start=self.start + tokens, tokens=self.tokens[tokens:])


Member = tuple[int, PrefillChunk]
"""Offset in the packed row, and the chunk."""


def similar_lengths(members: list[Member]) -> Iterator[list[Member]]:
    """Groups in which padding adds at most a half, and in which all chunks start at 0 or all read the
    cache."""

    def order(member: Member) -> tuple[bool, int]:
        _, chunk = member
        return chunk.start > 0, len(chunk.tokens)

    group: list[Member] = []
    for member in sorted(members, key=order):
        reads_cache, length = order(member)
        if group:
            group_reads_cache, shortest = order(group[0])
            if length > 1.5 * shortest + 8 or reads_cache != group_reads_cache:
                yield group
                group = []
        group.append(member)
    yield group


class PaddedChunks:
    """Chunks of similar length, padded to one rectangle for attention only."""

    def __init__(self, members: list[Member], device: torch.device) -> None:
        chunks = [chunk for _, chunk in members]
        longest = max(len(chunk.tokens) for chunk in chunks)
        columns = torch.arange(longest)[None]
        count = torch.tensor([[len(chunk.tokens)] for chunk in chunks])
        # Padding repeats the last token of the same chunk, so that a sequence with NaN spoils no other.
        inside = torch.minimum(columns, count - 1)
        offsets = torch.tensor([[offset] for offset, _ in members])
        starts = torch.tensor([[chunk.start] for chunk in chunks])
        self.take = (offsets + inside).to(device)
        self.valid = (columns < count).flatten().nonzero()[:, 0].to(device)
        self.put = self.take.flatten()[self.valid]
        self.rows = torch.tensor([chunk.row for chunk in chunks], device=device)
        positions = starts + inside
        reach = positions.clone()
        for row, chunk in enumerate(chunks):
            own = chunk.reach
            if own is not None:
                reach[row, : len(own)] = own
        self.is_causal = bool((starts == 0).all()) and torch.equal(reach, positions)
        """The chunks begin their sequences, and no token sees a later one."""
        self.end = max(chunk.end for chunk in chunks)
        self._positions = positions.to(device)
        self._reach = reach.to(device)
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """Which keys a token sees: those up to its reach, and within the window."""
        if window not in self._masks:
            keys = torch.arange(self.end, device=self._reach.device)
            seen = keys <= self._reach[..., None]
            if window is not None:
                seen &= self._positions[..., None] - keys < window
            self._masks[window] = seen[:, None]
        return self._masks[window]
