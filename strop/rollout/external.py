"""Base class of engines that hold a copy of the weights outside the trainer's module: vLLM, SGLang, replicas.

A subclass defines how one request is sent and how weights are pushed. This file has the rules of the engine
protocol: an invalid request fails alone, results keep the order of the requests, coroutines and batches share
the engine, and a weight update replaces all weights or none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from strop.config.schema.model import ModelConfig
from strop.models.build import compute_dtype, language_config
from strop.models.load import load_config, resolve
from strop.models.lora import has_adapters, merged_weights
from strop.registry import did_you_mean
from strop.rollout.base import (
    Completion,
    MoreRequests,
    Request,
    Sampling,
    check_request,
    completion_limit,
    error_completions,
    num_embeddings,
    refuse_more,
)
from strop.rollout.position_limit import resolve_max_model_len

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    from strop.rollout.base import NamedWeights

CompletionsFuture = Future[list[Completion]]
_SMALL_FILES = (".json", ".txt", ".jinja", ".model")
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")
"""Files that are the engine's own, or about weights."""


@dataclass
class ModelSource:
    """The model of an external engine: a folder that it can read, and the weights that it must be given."""

    folder: str
    """Of a Hugging Face model; has only config.json if the weights come from a module."""
    max_model_len: int
    vocab_size: int
    shapes: dict[str, tuple[int, ...]] | None = None
    """Of the module's weights. None: the engine loads the weights from the folder."""
    module: PreTrainedModel | None = None
    """Its weights have the names and layout of the engine's checkpoint, or transformers can convert them."""
    takes_images: bool = False
    """The model has a vision tower, and the folder has tokenizer and processor."""
    temporary: tempfile.TemporaryDirectory[str] | None = None
    """The folder, if it was made for the engine. Deleted at the latest when the process ends."""

    def close(self) -> None:
        """Delete the folder, if it was made for the engine."""
        if self.temporary is not None:
            self.temporary.cleanup()

    def check(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`weights` without second names of tied weights. Raises ValueError unless they are exactly the
        weights of the module."""
        if self.shapes is None:
            return dict(weights)
        tied = _tied_names(self.module)
        given = {name: weight for name, weight in weights.items() if name not in tied}
        for name, weight in given.items():
            if name not in self.shapes:
                raise ValueError(
                    f"The model of the engine has no weight {name!r}.{did_you_mean(name, self.shapes)}"
                )
            if self.shapes[name] != tuple(weight.shape):
                raise ValueError(
                    f"The weight {name!r} has the shape {self.shapes[name]} in the engine and "
                    f"{tuple(weight.shape)} here."
                )
        missing = self.shapes.keys() - given.keys()
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise ValueError(
                f"The engine takes all weights of its model or none: {len(missing)} of {len(self.shapes)} "
                f"are missing ({some})."
            )
        return given

    def as_checkpoint(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights with the names of a saved checkpoint: transformers keeps the experts of a layer in one
        tensor, checkpoints do not."""
        if self.module is None:
            yield from weights.items()
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self.module, weights).items()


def model_source(model: nn.Module | str | Path, max_model_len: int | None) -> ModelSource:
    """The source for a Hugging Face module (adapters allowed) or for the folder of a model."""
    if isinstance(model, str | Path):
        config = load_config(resolve(str(model)))
        limit = resolve_max_model_len(config, max_model_len)
        vision = hasattr(config, "vision_config")
        return ModelSource(str(model), limit, config.get_text_config().vocab_size, takes_images=vision)
    if has_adapters(model):
        base = cast("PeftModel", model).get_base_model()
    else:
        base = model
    base = cast("PreTrainedModel", base)
    limit = resolve_max_model_len(base.config, max_model_len)
    temporary = tempfile.TemporaryDirectory(prefix="strop-model-", ignore_cleanup_errors=True)
    folder = temporary.name
    config = copy.deepcopy(base.config)
    config.architectures = config.architectures or [type(base).__name__]
    config.eos_token_id = None  # Sampling.stop_ids decides where a completion ends
    config.save_pretrained(folder)
    shapes = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    vision = hasattr(config, "vision_config") and _copy_processor(str(base.config.name_or_path), folder)
    return ModelSource(folder, limit, num_embeddings(base), shapes, base, vision, temporary)


def engine_folder(settings: ModelConfig) -> str:
    """The folder from which an engine builds the model that the trainer builds: that of model.path, or one
    that links to its files and has the trainer's config.json. The latter goes with this process."""
    source = resolve(settings.path)
    if source.gguf_file is not None:
        return str(settings.path)
    config = language_config(settings)
    stored = load_config(source, trust_remote_code=settings.trust_remote_code)
    if config.to_dict() == stored.to_dict():
        return source.name
    files = Path(source.name)
    if not files.is_dir():
        from huggingface_hub import snapshot_download

        files = Path(snapshot_download(source.name))
    folder = tempfile.mkdtemp(prefix="strop-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in files.iterdir():
        if file.name != "config.json":
            (Path(folder) / file.name).symlink_to(file.absolute())
    config.save_pretrained(folder)
    return folder


def _copy_processor(source: str, folder: str) -> bool:
    """Copy tokenizer and processor of a model folder; False if it has none of them."""
    from strop.models.load import PROCESSOR_FILES

    found = False
    for file in sorted(Path(source).glob("*")):
        if file.name in PROCESSOR_FILES:
            found = True
        if file.suffix in _SMALL_FILES and file.name not in _WRITTEN:
            shutil.copy(file, folder)
    return found


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights by Hugging Face name, with LoRA merged."""
    if has_adapters(model):
        yield from merged_weights(model)
        return
    for name, weight in model.named_parameters():
        yield name, weight.detach()


def engine_dtype(dtype: str, model: nn.Module | str | Path) -> str:
    """The engine's dtype: `auto` is that of the module's weights; a CPU without bf16 instructions gets
    float32."""
    if not isinstance(model, nn.Module):
        return dtype
    weight = next(model.parameters())
    chosen = weight.dtype if dtype == "auto" else compute_dtype(dtype, weight.device)
    return str(chosen).removeprefix("torch.")


def _tied_names(module: nn.Module | None) -> set[str]:
    """Second names of tied weights: some callers pass them, engines tie them themselves."""
    if module is None:
        return set()
    all_names = dict(module.named_parameters(remove_duplicate=False)).keys()
    return all_names - dict(module.named_parameters()).keys()


class ExternalEngine:
    """The engine protocol without abort, sleep, wake and the three methods below, which a subclass
    defines."""

    same_stream = False
    takes_images = False
    """Whether requests may have images."""

    def __init__(self, source: ModelSource) -> None:
        self.version = 0
        self.max_model_len = source.max_model_len
        self._source = source
        self._meter = ThroughputMeter()

    # --- defined by a subclass ------------------------------------------------------------------------------

    def _send_request(self, request: Request, sampling: Sampling) -> CompletionsFuture:
        """Start a request. It is valid and its max_tokens is set."""
        raise NotImplementedError

    def _push_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights. `weights` have the names of a saved checkpoint."""
        raise NotImplementedError

    def _set_version(self, version: int) -> None:
        """The weights stay the same and have this version from now on."""
        raise NotImplementedError

    # --- the engine protocol --------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: MoreRequests | None = None
    ) -> list[list[Completion]]:
        refuse_more(self, more)
        futures = [self._submit(request, sampling) for request in requests]
        return [future.result() for future in futures]

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        return await asyncio.wrap_future(self._submit(request, sampling))

    def _submit(self, request: Request, sampling: Sampling) -> CompletionsFuture:
        request = replace(request, n=max(1, request.n))
        known = (self._source.vocab_size, self.max_model_len, sampling)
        reason = check_request(request, *known, takes_images=self.takes_images)
        if any(image.video for image in request.images):
            reason = "the prompt has a video, which this engine is not given; set rollout.name=native or hf"
        future: CompletionsFuture = Future()
        if reason is not None:
            future.set_result(error_completions(request, reason, self.version))
            return future
        limit = min(completion_limit(request, sampling), self.max_model_len - len(request.ids))
        self._meter.start(len(request.ids))
        sent = self._send_request(replace(request, max_tokens=limit), sampling)

        def on_done(done: CompletionsFuture) -> None:
            error = done.exception()
            completions = []
            if error is None:
                completions = [_mark_nan_as_error(completion) for completion in done.result()]
            self._meter.end(sum(len(completion.ids) for completion in completions))
            with contextlib.suppress(InvalidStateError):  # the caller may have cancelled it
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(completions)

        sent.add_done_callback(on_done)
        return future

    def update_weights(self, weights: NamedWeights, version: int) -> None:
        given = dict(weights)
        if given:
            self._push_weights(self._source.as_checkpoint(self._source.check(given)), version)
        else:
            self._set_version(version)
        self.version = version

    def _load_initial_weights(self, model: nn.Module | str | Path) -> None:
        """Push the module's weights, unless the engine loaded them from a folder."""
        if self._source.shapes is not None:
            self.update_weights(named_weights(cast("nn.Module", model)), 0)

    def use_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Ignored: another process or library launches the kernels."""

    def release_memory(self) -> bool:
        """`sleep` has freed everything already."""
        return False

    def stats(self) -> Mapping[str, float]:
        return self._meter.read()

    def close(self) -> None:
        self._source.close()


class ThroughputMeter:
    """Counts tokens, and the time during which at least one request was running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._running_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._tokens = 0
        self._prompt_tokens = 0
        self._seconds = 0.0

    def start(self, prompt_tokens: int) -> None:
        """A request with this prompt was started."""
        with self._lock:
            if self._num_running == 0:
                self._running_since = time.perf_counter()
            self._num_running += 1
            self._prompt_tokens += prompt_tokens

    def end(self, tokens: int) -> None:
        """A request has finished with so many sampled tokens."""
        with self._lock:
            self._num_running -= 1
            self._tokens += tokens
            if self._num_running == 0:
                self._seconds += time.perf_counter() - self._running_since

    def read(self) -> dict[str, float]:
        """The numbers since the last reading."""
        with self._lock:
            now = time.perf_counter()
            seconds = self._seconds
            if self._num_running:
                seconds += now - self._running_since
            numbers = {
                "tokens": float(self._tokens),
                "prompt_tokens": float(self._prompt_tokens),
                "seconds": seconds,
                "tokens_per_second": self._tokens / seconds if seconds else 0.0,
            }
            self._reset()
            self._running_since = now
            return numbers


def _mark_nan_as_error(completion: Completion) -> Completion:
    """A completion with a NaN log-prob becomes an error; the tokens before it are kept."""
    for i, log_prob in enumerate(completion.log_probs):
        if log_prob is None or math.isnan(log_prob):  # JSON has no NaN
            reason = "the model's logits are not numbers (NaN or infinity)"
            return Completion(
                completion.ids[:i], completion.log_probs[:i], "error", completion.version, reason
            )
    return completion
