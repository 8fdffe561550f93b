"""Read and check the JSON requests of the protocol; what is wrong with one is said to its sender."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from strop.rewards.server_requests import RequestRefused, printable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TINKER_PATH = re.compile(
    r"tinker://(?P<model>[A-Za-z0-9:_-]{1,128})/(?P<kind>weights|sampler_weights)/(?P<name>[^/]{1,128})"
)


class Fields:
    """The object of a JSON request; every getter says which field has which wrong value."""

    def __init__(self, content: Mapping[str, object], where: str = "") -> None:
        self._content = content
        self._where = where

    @staticmethod
    def read(body: bytes) -> Fields:
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(400, f"The body is not JSON: {printable(str(error))}") from error
        if not isinstance(content, dict):
            raise RequestRefused(400, f"The body must be a JSON object, it is {type(content).__name__}.")
        return Fields(content)

    def _refuse(self, name: str, value: object, wanted: str) -> RequestRefused:
        shown = printable(json.dumps(value))
        return RequestRefused(400, f"{self._where}{name} must be {wanted}, it is {shown}.")

    def has(self, name: str) -> bool:
        return self._content.get(name) is not None

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str) or not value:
            raise self._refuse(name, value, "a text")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def checkpoint_name(self, name: str) -> str:
        """A text that is safe as the name of a folder."""
        value = self.text(name)
        if _NAME.fullmatch(value) is None:
            raise self._refuse(name, value, "1 to 128 letters, digits, '.', '_' and '-', and begin with one")
        return value

    def integer(self, name: str, *, low: int = 0, high: int = 2**62) -> int:
        value = self._content.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, *, low: int = 0, high: int = 2**62) -> int | None:
        return self.integer(name, low=low, high=high) if self.has(name) else None

    def number(self, name: str, default: float, *, low: float = 0.0, high: float = math.inf) -> float:
        value = self._content.get(name, default)
        wanted = f"a finite number from {low:g} to {high:g}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._refuse(name, value, wanted)
        if not abs(value) <= sys.float_info.max or not low <= value <= high:  # also false for NaN
            raise self._refuse(name, str(value), wanted)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refuse(name, value, "true or false")
        return value

    def object(self, name: str) -> Fields:
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise self._refuse(name, value, "an object")
        return Fields(value, f"{self._where}{name}.")

    def objects(self, name: str) -> list[Fields]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise self._refuse(name, value, "a list of objects")
        found = []
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                raise self._refuse(f"{name}[{index}]", item, "an object")
            found.append(Fields(item, f"{self._where}{name}[{index}]."))
        return found

    def token_ids(self, name: str, vocabulary: int) -> list[int]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise self._refuse(name, value, "a list of token ids")
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocabulary:
                raise self._refuse(f"{name} entry", item, f"a token id from 0 to {vocabulary - 1}")
        return value

    def texts_or_ids(self, name: str) -> list[str] | list[int] | None:
        """Stop sequences: one text, a list of texts, a list of token ids, or nothing."""
        value = self._content.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return [value]
        if isinstance(value, list):
            for kind in (str, int):
                if all(isinstance(item, kind) and not isinstance(item, bool) for item in value):
                    return value
        raise self._refuse(name, value, "a text, a list of texts or a list of token ids")

    def metadata(self, name: str) -> dict[str, str]:
        """What a user attached; kept as text."""
        value = self._content.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._refuse(name, value, "an object")
        return {str(key): str(item) for key, item in value.items()}


@dataclass(frozen=True)
class CheckpointPath:
    """tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME."""

    model_id: str
    kind: str
    """weights | sampler_weights."""
    name: str

    @staticmethod
    def parse(text: str) -> CheckpointPath:
        match = _TINKER_PATH.fullmatch(text)
        if match is None or _NAME.fullmatch(match["name"]) is None:
            raise RequestRefused(
                400,
                f"{printable(text)} is no path of weights. Expected tinker://MODEL/weights/NAME or "
                "tinker://MODEL/sampler_weights/NAME.",
            )
        return CheckpointPath(match["model"], match["kind"], match["name"])

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SampleRequest:
    """A request to sample from, or to score a prompt with, one sampler."""

    prompt: list[int]
    n: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: list[str] | list[int] | None
    """None: the end-of-text tokens of the model; []: none at all."""
    prompt_log_probs: bool
    last_n: int | None
    """Score only so many tokens at the end of the prompt."""


@dataclass(frozen=True)
class SampleLimits:
    """What one request may ask for."""

    vocabulary: int
    context: int
    """Tokens of prompt and response."""
    samples: int


NOT_OFFERED = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")


def read_sample_request(fields: Fields, limits: SampleLimits) -> SampleRequest:
    """Check a sample request against the limits."""
    for name in NOT_OFFERED:
        if fields.has(name) and fields.integer(name):
            raise RequestRefused(400, f"{name} is not offered by this service; leave it at 0.")
    if fields.has("target_prompt_logprobs"):
        raise RequestRefused(400, "target_prompt_logprobs is not offered by this service.")
    if fields.flag("record_stability_info", False):
        raise RequestRefused(400, "record_stability_info is not offered by this service.")
    prompt = read_tokens(fields.object("prompt"), limits.vocabulary)
    if not prompt:
        raise RequestRefused(400, "The prompt has no tokens.")
    params = fields.object("sampling_params")
    room = limits.context - len(prompt)
    if room < 1:
        raise RequestRefused(
            400, f"The prompt has {len(prompt)} tokens; the context of {limits.context} has no room left."
        )
    max_tokens = params.optional_integer("max_tokens", low=1)
    top_k = params.optional_integer("top_k", low=-1)
    last_n = None
    if fields.has("prompt_logprobs_last_n"):
        last_n = fields.integer("prompt_logprobs_last_n", low=1, high=max(1, len(prompt) - 1))
    return SampleRequest(
        prompt=prompt,
        n=fields.integer("num_samples", low=1, high=limits.samples) if fields.has("num_samples") else 1,
        max_tokens=min(room, max_tokens or room),
        temperature=params.number("temperature", 1.0, high=100.0),
        top_k=0 if top_k is None or top_k < 0 else top_k,
        top_p=params.number("top_p", 1.0, high=1.0),
        seed=params.optional_integer("seed", low=-(2**62)),
        stop=params.texts_or_ids("stop"),
        prompt_log_probs=fields.flag("prompt_logprobs", False),
        last_n=last_n,
    )


def read_tokens(model_input: Fields, vocabulary: int) -> list[int]:
    """The token ids of a model input, which may be cut into chunks."""
    tokens: list[int] = []
    for chunk in model_input.objects("chunks"):
        kind = chunk.optional_text("type") or "encoded_text"
        if kind != "encoded_text":
            raise RequestRefused(400, f"The prompt holds a chunk of {printable(kind)}; only text is offered.")
        tokens += chunk.token_ids("tokens", vocabulary)
    return tokens


@dataclass(frozen=True)
class AdamStep:
    """The hyperparameters of one optimizer step."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float | None


def read_adam(fields: Fields) -> AdamStep:
    """The parameters of optim_step; the defaults are those of the protocol."""
    if not fields.has("adam_params"):
        raise RequestRefused(400, "optim_step needs adam_params: AdamW is the optimizer of this service.")
    params = fields.object("adam_params")
    clip = params.number("grad_clip_norm", 0.0, low=-math.inf)
    return AdamStep(
        learning_rate=params.number("learning_rate", 1e-4),
        betas=(params.number("beta1", 0.9, high=1.0), params.number("beta2", 0.95, high=1.0)),
        eps=params.number("eps", 1e-12),
        weight_decay=params.number("weight_decay", 0.0),
        grad_clip=clip if clip > 0 else None,
    )
