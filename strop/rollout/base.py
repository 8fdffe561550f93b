"""The protocol of rollout engines (token ids in, token ids and log-probs out), and what all engines share:
checks of requests, weight updates by name, and the versions of the weights that sampled a completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Protocol, cast

from strop.catalog import ENGINES
from strop.errors import CRASHED
from strop.registry import did_you_mean
from strop.types import Images

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    NamedWeights = Iterable[tuple[str, Tensor]]


_SMALLEST = 1e-30
"""Logits divided by less are beyond float32."""
_LARGEST_ID = (1 << 31) - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. Log-probs are those after temperature, before top-k and top-p."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 or less: all tokens."""
    top_p: float = 1.0
    """1: all tokens."""
    min_p: float = 0.0
    """0: all tokens."""
    max_tokens: int = 512
    """Limit of tokens per completion."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the stop token itself is part of it."""
    ignore_eos: bool = False
    """Do not end at stop tokens."""
    repetition_penalty: float = 1.0
    """1: none."""

    def __post_init__(self) -> None:
        _check_sampling(self)


def _check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for the first setting that no engine can take: all requests of a step would fail."""
    smallest = f"at least {_SMALLEST:g}"
    greedy = sampling.temperature == 0
    for name, is_allowed, words in (
        ("temperature", greedy or sampling.temperature >= _SMALLEST, f"0 (greedy) or {smallest}"),
        ("top_k", sampling.top_k % 1 == 0, "a whole number"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1 (temperature=0 is greedy)"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty >= _SMALLEST, smallest),
        ("stop_ids", all(abs(token) <= _LARGEST_ID for token in sampling.stop_ids), "token ids"),
    ):
        if not is_allowed:
            raise ValueError(f"{name}={getattr(sampling, name)} must be {words}.")


OnTokens = Callable[[int, Sequence[int], Sequence[float]], None]


@dataclass(frozen=True)
class Request:
    """A prompt and the number of completions to sample for it."""

    ids: Sequence[int]
    n: int = 1
    seed: int | None = None
    """Sample i uses the random stream of (seed, i), independent of the rest of the batch. None: the engine's
    random stream."""
    max_tokens: int | None = None
    """Overrides Sampling.max_tokens."""
    first: int = 0
    """Index of the first sample in the random streams of `seed`: sample i of a request equals the only sample
    of the same request with n=1 and first=i."""
    images: Images = field(default=(), compare=False)
    """The images of the prompt, whose placeholder tokens are in `ids`."""
    on_tokens: OnTokens | None = field(default=None, compare=False)
    """Called with (sample, ids, log-probs) as tokens are sampled, by engines that can stream."""
    adapter: str | None = None
    """The loaded LoRA adapter to sample with (AdapterEngine); None: the model as it is."""
    on_done: Callable[[], None] | None = field(default=None, compare=False)
    """Called once all samples are complete or aborted, before the next step of the engine, by engines that
    step in the thread of `generate` (the fact `fed` of the catalog)."""


MoreRequests = Callable[[int], Sequence[Request]]
"""Called by `Engine.generate` with the number of free slots; returns further requests, or an empty list when
there are no more."""


@dataclass
class Completion:
    """One sampled continuation of a prompt."""

    ids: list[int]
    log_probs: list[float]
    finish: str
    """stop | length | abort | error."""
    version: int = 0
    """Version of the weights that sampled it (the newest, if they were updated during sampling)."""
    error: str | None = None
    """The reason, where finish is error."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Spans (version, number of tokens), in order, if the weights were updated during sampling. Empty: all
    tokens have `version`."""
    adapter_version: int = 0
    """Which `load_adapter` call of the engine gave the adapter that sampled it, counted from 1; 0: no
    adapter. A request has one from its begin to its end; parts of a continued completion may have several,
    of which this is the newest."""
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Those of prompt and completion, where the engine records them: see Trajectory."""


class EngineDied(ChildProcessError):
    """The engine's process has ended or is unreachable. It cannot be used any more."""

    exit_code = CRASHED


class Engine(Protocol):
    """A rollout engine. One instance lives as long as the run.

    `generate` returns the completions of each request, in the order of the requests.
    """

    version: int
    """Version of the weights; the trainer uses its step number."""

    @property
    def same_stream(self) -> bool:
        """True: a sampled token depends only on its random stream and its position, so a continued completion
        equals one that was never interrupted. False: each request restarts its random stream."""
        ...

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: MoreRequests | None = None
    ) -> list[list[Completion]]:
        """Completions of `requests`, then of the requests that `more` returned, in order.

        Engines that cannot take requests during a call raise ValueError for `more` (see refuse_more).
        """
        ...

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The same for one request. Many coroutines may call it at once; they share batches."""
        ...

    def update_weights(self, weights: NamedWeights, version: int) -> None:
        """Load weights by Hugging Face name. An engine that samples from the trainer's module only takes the
        version."""
        ...

    def use_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Launch kernels on this CUDA stream; None: the current stream. Engines that launch no kernels from
        this process, or always use the current stream, ignore it."""
        ...

    def sleep(self) -> None:
        """Free memory between rollouts."""
        ...

    def wake(self) -> None:
        """Prepare for the next rollout after `sleep`."""
        ...

    def release_memory(self) -> bool:
        """Free device memory that the engine kept during `sleep`. Returns whether anything was freed."""
        ...

    def abort(self) -> None:
        """End all running requests. They return what they have with finish=abort."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Tokens per second, occupancy, cache use ... since the last call; keys are metric names below
        `rollout/`."""
        ...

    def close(self) -> None:
        """Abort all requests and free all resources."""
        ...


class AdapterEngine(Engine, Protocol):
    """An engine that samples with several LoRA adapters over one model, in one batch (Request.adapter)."""

    def load_adapter(self, name: str, weights: Mapping[str, Tensor], scale: float) -> None:
        """Copy an adapter: for each adapted linear module, its path in the Hugging Face model with `.lora_A`
        ([rank, in]) and `.lora_B` ([out, rank]). The module adds scale * B A x.

        A name that is loaded already gets the new weights: requests from now on use them, and requests that
        are in the engine finish with the weights that they began with. Waits for a step that is running.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Requests from now on cannot name it; requests that are in the engine finish with it."""
        ...


def refuse_more(engine: object, more: MoreRequests | None) -> None:
    """Raise ValueError if `more` is given: this engine cannot take requests during `generate`."""
    if more is not None:
        raise ValueError(
            f"{type(engine).__name__} cannot take further requests while it generates. Pass all requests at "
            "once, or set rollout.name=native."
        )


def completion_limit(request: Request, sampling: Sampling) -> int:
    """Limit of tokens of one completion of this request."""
    return sampling.max_tokens if request.max_tokens is None else request.max_tokens


def num_embeddings(model: PreTrainedModel) -> int:
    """The size of the vocabulary, padding of the embedding included."""
    embeddings = model.get_input_embeddings()
    return int(cast("nn.Embedding", getattr(embeddings, "base_layer", embeddings)).num_embeddings)


def check_request(
    request: Request,
    vocab_size: int,
    max_model_len: int,
    sampling: Sampling,
    adapters: Collection[str] | None = None,
    takes_images: bool = False,
) -> str | None:
    """Why a request cannot be served, or None. Engines answer such a request with finish=error and serve the
    rest of the batch. `adapters`: names of the loaded adapters; None: the engine has no adapters at all."""
    if request.images and not takes_images:
        return "the prompt has images, which this engine does not take; set rollout.name=native or hf"
    limit = completion_limit(request, sampling)
    if request.adapter is not None:
        if adapters is None:
            return (
                f"the request names the adapter {request.adapter!r}, and this engine samples with the "
                "weights of its model only; set rollout.name=native"
            )
        if request.adapter not in adapters:
            loaded = ", ".join(sorted(adapters)) or "none"
            return f"no adapter {request.adapter!r} is loaded; loaded are: {loaded}"
    if not request.ids:
        return "the prompt is empty"
    if not isinstance(limit, Integral):
        return f"max_tokens={limit} is not a whole number"
    if limit < 1:
        return f"max_tokens={limit}: nothing to generate"
    if len(request.ids) >= max_model_len:
        return f"the prompt has {len(request.ids)} tokens and leaves no room in max_model_len={max_model_len}"
    for token in request.ids:
        if not 0 <= token < vocab_size:
            return f"token id {token} is outside the vocabulary of {vocab_size}"
    return None


def error_completions(request: Request, reason: str, version: int) -> list[Completion]:
    """One completion with finish=error per sample of the request."""
    return [Completion([], [], "error", version, reason) for _ in range(max(1, request.n))]


def copy_weights(model: nn.Module, weights: NamedWeights) -> None:
    """Copy each tensor into the parameter or buffer of that name, unless it shares its memory."""
    import torch

    targets = dict(model.named_buffers(remove_duplicate=False))
    targets.update(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, source in weights:
            if name not in targets:
                raise ValueError(
                    f"The model of the engine has no weight {name!r}.{did_you_mean(name, targets)}"
                )
            target = targets[name]
            if target.shape != source.shape:
                raise ValueError(
                    f"The weight {name!r} has the shape {tuple(target.shape)} in the engine and "
                    f"{tuple(source.shape)} here."
                )
            if target.data_ptr() != source.data_ptr() or target.device != source.device:
                target.copy_(source)


def build_engine(name: str, model: nn.Module | str | Path, **settings: object) -> Engine:
    """The registered engine `name` over a Hugging Face module or the folder of a model.

    A setting that is None, or that only other engines have, is left out. `engine_kwargs` maps an engine's
    name to the arguments of its library.
    """
    known: set[str] = set()
    for registered in ENGINES.names():
        known.update(ENGINES.entry(registered).facts["settings"])
    for key in settings:
        if key not in known:
            raise ValueError(f"No rollout engine has a setting {key!r}.{did_you_mean(key, known)}")
    if settings.get("engine_kwargs") is not None:
        kwargs_by_engine = cast("Mapping[str, object]", settings["engine_kwargs"])
        settings["engine_kwargs"] = kwargs_by_engine.get(name)
    accepted = ENGINES.entry(name).facts["settings"]
    arguments = {key: value for key, value in settings.items() if key in accepted and value is not None}
    return cast("Engine", ENGINES.get(name)(model, **arguments))


def version_spans(completion: Completion) -> list[tuple[int, int]]:
    """Spans (version, number of tokens) in order, also if all tokens have one version."""
    if completion.versions:
        return completion.versions
    if completion.ids:
        return [(completion.version, len(completion.ids))]
    return []


def merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent spans of one version become one; empty spans are dropped."""
    merged: list[tuple[int, int]] = []
    for version, count in spans:
        if count and merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        elif count:
            merged.append((version, count))
    return merged


def newest_version(spans: Sequence[tuple[int, int]], current: int) -> int:
    """The version that sampled the newest token; `current` if there is none."""
    return spans[-1][0] if spans else current


def truncate_spans(spans: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The spans of the first `tokens` tokens."""
    kept = []
    for version, count in spans:
        kept.append((version, min(count, tokens)))
        tokens -= kept[-1][1]
    return merge_spans(kept)


def stream_seed(*parts: int) -> int:
    """One 62-bit seed of a random stream from several numbers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 2
