"""A prompt with the samples that it has so far, and how these are saved and sent between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from strop.rollout.base import (
    Completion,
    Request,
    Sampling,
    completion_limit,
)
from strop.rollout.continuation import continuation, join_completions
from strop.types import Prompt


@dataclass(frozen=True)
class PackedSamples:
    """Completions with their tokens as two arrays."""

    ids: np.ndarray
    log_probs: np.ndarray
    rest: list[tuple[int, str, int, str | None, list[tuple[int, int]], int]]
    """Length, finish, version, error, versions and adapter version of each."""
    experts: list[np.ndarray | None] = field(default_factory=list)
    """Of each, where the engine records them (router replay)."""

    @staticmethod
    def pack(samples: Sequence[Completion]) -> PackedSamples:
        ids: list[int] = []
        log_probs: list[float] = []
        rest = []
        for one in samples:
            ids += one.ids
            log_probs += one.log_probs
            rest.append((len(one.ids), one.finish, one.version, one.error, one.versions, one.adapter_version))
        experts = [one.experts for one in samples]
        return PackedSamples(np.array(ids, np.int64), np.array(log_probs, np.float64), rest, experts)

    def unpack(self) -> list[Completion]:
        samples = []
        start = 0
        experts = self.experts or [None] * len(self.rest)
        for sample, (length, finish, version, error, versions, adapter_version) in enumerate(self.rest):
            part = slice(start, start + length)
            samples.append(
                Completion(
                    self.ids[part].tolist(),
                    self.log_probs[part].tolist(),
                    finish,
                    version,
                    error,
                    [(number, count) for number, count in versions],
                    adapter_version,
                    experts[sample],
                )
            )
            start += length
        return samples


@dataclass(eq=False)
class OpenGroup:
    """A prompt that was drawn and not trained on yet."""

    number: int
    """Counts the prompts of the run in the order in which they were drawn."""
    prompt: Prompt
    step: int = 0
    """The step that started to sample it, whose random streams it uses. 0: it is not started."""
    samples: list[Completion] = field(default_factory=list)
    """Those with finish=abort are unfinished. Empty: it is not started."""
    _packed: PackedSamples | None = None

    @property
    def done(self) -> bool:
        """All samples are complete."""
        return bool(self.samples) and not self.unfinished()

    @property
    def tokens(self) -> int:
        return sum(len(one.ids) for one in self.samples)

    def unfinished(self) -> list[int]:
        """Indices of the samples that are to be continued."""
        return [i for i, one in enumerate(self.samples) if one.finish == "abort"]

    def continued(self, whole: Request, sampling: Sampling, sample: int, *, same_stream: bool) -> Request:
        """The request that continues one sample; `whole` is the request of all samples."""
        limit = completion_limit(whole, sampling)
        return continuation(whole, sample, self.samples[sample], limit, same_stream=same_stream)

    def add(self, completions: Sequence[Completion], sample: int | None) -> None:
        """New tokens of one sample; None: of all samples, which had none."""
        self._packed = None
        if sample is None:
            self.samples = list(completions)
            return
        [more] = completions
        self.samples[sample] = join_completions(self.samples[sample], more)

    def forget_if_empty(self) -> None:
        """A prompt that waited in the engine without a token is not started."""
        if not self.done and not self.tokens:
            self.restart()

    def restart(self) -> None:
        """Forget the samples: the prompt is not started."""
        self.samples = []
        self.step = 0
        self._packed = None

    def fits(self, samples: int, max_tokens: int) -> bool:
        """Whether it has as many samples as a prompt gets, none of them too long; or none at all."""
        if not self.samples:
            return True
        lengths = [len(one.ids) + (one.finish == "abort") for one in self.samples]
        return len(lengths) == samples and max(lengths) <= max_tokens

    def pack(self) -> PackedSamples:
        """The samples as arrays, made once for all states that are taken of them."""
        if self._packed is None:
            self._packed = PackedSamples.pack(self.samples)
        return self._packed

    def state_dict(self) -> dict[str, Any]:
        packed = self.pack()
        return {
            "number": self.number,
            "row": self.prompt.index,
            "step": self.step,
            "ids": torch.from_numpy(packed.ids),
            "log_probs": torch.from_numpy(packed.log_probs),
            "rest": packed.rest,
            "experts": [None if one is None else torch.from_numpy(one) for one in packed.experts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        # Checkpoints of earlier versions have no experts.
        experts = [None if one is None else one.numpy() for one in state.get("experts", [])]
        packed = PackedSamples(state["ids"].numpy(), state["log_probs"].numpy(), state["rest"], experts)
        self.samples = packed.unpack()
        self._packed = None
