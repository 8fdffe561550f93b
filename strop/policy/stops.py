"""Where a response ends: at tokens, which the engine knows, or at texts, where it is cut afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from strop.rollout.base import Sampling
from strop.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Stops = str | int | Sequence[str | int]
"""Token ids and texts that end a response; one of them, or a list."""


def _listed(stop: Stops) -> Sequence[str | int]:
    return [stop] if isinstance(stop, str | int) else stop


def sampling_until(
    ends: Iterable[int], stop: Stops, max_tokens: int, temperature: float, top_k: int, top_p: float
) -> Sampling:
    """The engine's settings. `ends`: the end tokens of the model."""
    tokens = {*ends, *(item for item in _listed(stop) if isinstance(item, int))}
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=max_tokens,
        stop_ids=tuple(sorted(tokens)),
    )


def cut_at_text(trajectory: Trajectory, stop: Stops, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    """The trajectory up to the token that completes the first of the texts in `stop`."""
    texts = [item for item in _listed(stop) if isinstance(item, str) and item]

    def has_one(ids: Sequence[int]) -> bool:
        decoded = str(tokenizer.decode(list(ids), skip_special_tokens=False))
        return any(text in decoded for text in texts)

    if not texts or not has_one(trajectory.response):
        return trajectory
    low = 1
    high = len(trajectory.response)
    while low < high:
        middle = (low + high) // 2
        if has_one(trajectory.response[:middle]):
            high = middle
        else:
            low = middle + 1
    return dataclasses.replace(
        trajectory,
        response=trajectory.response[:low],
        mask=trajectory.mask[:low],
        log_probs=trajectory.log_probs[:low],
        finish="stop",
    )
