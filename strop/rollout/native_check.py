"""The native engine as runs build it: only over models that it samples right.

What it samples is compared with what training recomputes, on a small model of the same class
(models/layouts/small_model.py), once per class and configuration. A model with layers that the engine does
not know, or computes wrongly, is refused before the run, with the difference in the message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strop.models.attention import padded_attention, set_attention
from strop.models.layouts.check import FAILURES, Measured, reason_of, words_of
from strop.models.layouts.small_model import build_small, class_of, config_key, small_config, small_model
from strop.models.lora import base_model
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

_PROMPTS = (3, 26, 9, 21, 1)
_COMMON = 18
"""Tokens that the two longest prompts begin with: more than a block of the prefix cache."""
_TOKENS = 7
_BATCH_TOKENS = 16
"""Longer prompts are prefilled in chunks."""


def checked_engine(model: PreTrainedModel, **settings: object) -> NativeEngine:
    """The native engine over `model`, or ValueError if it would sample what training does not recompute."""
    refuse_wrong_sampling(model)
    return NativeEngine(model, **settings)  # type: ignore[arg-type] # build_engine gives what it takes


def refuse_wrong_sampling(model: PreTrainedModel) -> None:
    core = base_model(model)
    try:
        small = small_model(core)
        complaint = sampling_complaint(class_of(core), core.config, small)
    except FAILURES as error:
        log.warning(
            "%s: no small model of this class can be built (%s), so the native engine is not measured. "
            "Compare its log-probs with recomputed ones in the metrics of the first steps.",
            type(core).__name__,
            words_of(error),
        )
        return
    if complaint is not None:
        raise ValueError(f"{complaint} Set actor_rollout_ref.rollout.name=hf.")


_by_class: dict[tuple[type[nn.Module], str], Measured] = {}


def sampling_complaint(
    kind: type[PreTrainedModel], config: PreTrainedConfig, small: PreTrainedModel | None = None
) -> str | None:
    """Why the native engine cannot sample from models of this class and configuration, or None. `small`: a
    small model of them, if there is one already."""
    key = (kind, config_key(config))
    if key not in _by_class:
        _by_class[key] = measure_sampling(small or build_small(kind, small_config(config)))
    measured = _by_class[key]
    if measured.right:
        return None
    return f"The native engine cannot sample from {kind.__name__}: {measured}."


@torch.no_grad()
def measure_sampling(model: PreTrainedModel) -> Measured:
    """Sample from this very model, and compare the log-probs with those of a plain pass. Raises what the
    model raises in a plain pass."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 61, (length,), generator=generator).tolist() for length in _PROMPTS]
    prompts[3][:_COMMON] = prompts[1][:_COMMON]
    requests = [Request(prompt, n=2) for prompt in prompts]
    set_attention(model, padded_attention(model))
    _log_probs(model, prompts[0], prompts[0])
    try:
        engine = NativeEngine(model, max_num_seqs=4, max_num_batched_tokens=_BATCH_TOKENS)
        completions = engine.generate(requests, Sampling(max_tokens=_TOKENS, ignore_eos=True))
    except FAILURES as error:
        return Measured(None, reason_of(error))
    largest = 0.0
    set_attention(model, padded_attention(model))
    for request, answers in zip(requests, completions, strict=True):
        for answer in answers:
            if answer.error is not None:
                return Measured(None, answer.error)
            expected = _log_probs(model, request.ids, answer.ids)
            largest = max(largest, float((torch.tensor(answer.log_probs) - expected).abs().max()))
    return Measured(largest, f"its log-probs differ by up to {largest:.2g} from recomputed ones")


def _log_probs(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
