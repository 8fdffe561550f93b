"""The protocol of rollout engines: token ids in, token ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from strop.errors import CRASHED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Reported log-probs are those after temperature, before top-k and top-p."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 or less: all tokens."""
    top_p: float = 1.0
    """1: all tokens."""
    min_p: float = 0.0
    """0: all tokens."""
    max_tokens: int = 512
    """Most tokens of one completion."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the stop token itself is part of it."""
    ignore_eos: bool = False
    """Go on past every stop token."""
    repetition_penalty: float = 1.0
    """1: none."""


OnTokens = Callable[[int, Sequence[int], Sequence[float]], None]


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions are wanted."""

    ids: Sequence[int]
    n: int = 1
    seed: int | None = None
    """Sample i draws from a stream of (seed, i), whatever else is in the batch. None: the engine's own stream."""
    max_tokens: int | None = None
    """Overrides Sampling.max_tokens."""
    first: int = 0
    """Number of the first sample in the streams of `seed`: sample i of a request is also a request of its own with first=i."""
    on_tokens: OnTokens | None = field(default=None, compare=False)
    """Told of new tokens as they come, by engines that can: (sample, ids, log-probs)."""


@dataclass
class Completion:
    """One sampled continuation."""

    ids: list[int]
    log_probs: list[float]
    finish: str
    """stop | length | abort | error."""
    version: int = 0
    """Version of the weights that sampled it (the newest, if they changed on the way)."""
    error: str | None = None
    """Why finish is error."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Where weights changed on the way: (version, tokens it sampled), in order. Empty: all of them by `version`."""


@dataclass
class EngineStats:
    """What the engine did since it was last asked."""

    numbers: dict[str, float] = field(default_factory=dict)


class EngineDied(ChildProcessError):
    """What samples has ended, or cannot be reached any more; nothing more can be asked of it."""

    exit_code = CRASHED


class Engine(Protocol):
    """An engine lives as long as the run. `generate` returns completions per request, in the order of the requests."""

    version: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]: ...

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """For agents: many coroutines call it at once and share batches."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """New weights by Hugging Face name. An engine that samples from the trainer's own module only takes the version."""
        ...

    def sleep(self) -> None:
        """Give memory back between rollouts."""
        ...

    def wake(self) -> None: ...

    def abort(self) -> None:
        """End what is running; its requests return with finish=abort and what they have."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Tokens per second, occupancy, cache use ... since the last call; names are metric names below `rollout/`."""
        ...

    def close(self) -> None: ...


def check_request(request: Request, vocabulary: int, longest: int, sampling: Sampling) -> str | None:
    """Why a request cannot be served, or None. Engines answer such a request with finish=error and go on with the others."""
    limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
    if not request.ids:
        return "the prompt is empty"
    if limit < 1:
        return f"max_tokens={limit}: nothing to generate"
    if len(request.ids) >= longest:
        return f"the prompt has {len(request.ids)} tokens and leaves no room in max_model_len={longest}"
    strange = [i for i in request.ids if not 0 <= i < vocabulary]
    if strange:
        return f"token id {strange[0]} is outside the vocabulary of {vocabulary}"
    return None


def failed(request: Request, why: str, version: int) -> list[Completion]:
    return [Completion([], [], "error", version, why) for _ in range(max(1, request.n))]


Weights = Iterable[tuple[str, Any]]
