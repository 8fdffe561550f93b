"""Whether a model computes with a float32 residual stream (models/residual.py), found by trying it.

A layer may read the stream without a norm: attention of OLMo 2 and EXAONE 4 does, and the per-layer inputs of
Gemma 3n. A matrix product with 16-bit weights then raises an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from strop.models.changes import Change
from strop.models.layouts.check import FAILURES, words_of
from strop.models.layouts.small_model import class_of, config_key, small_model
from strop.models.lora import base_model
from strop.models.residual import ResidualHooks, widen_residual

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_by_class: dict[tuple[type[nn.Module], str], bool] = {}


def widened(model: nn.Module) -> list[Change]:
    """Keep the residual stream of a model in float32, if it can; returns what was changed."""
    hooks = ResidualHooks(model)
    if takes_wide_stream(base_model(model)):
        hooks.do()
    return [hooks] if hooks.handles else []


def takes_wide_stream(model: PreTrainedModel) -> bool:
    """Whether a small model of the same class runs in bf16 with a float32 stream, once per class and
    configuration. True where no small model runs in bf16."""
    key = (class_of(model), config_key(model.config))
    if key not in _by_class:
        _by_class[key] = _tried(model)
    return _by_class[key]


@torch.no_grad()
def _tried(model: PreTrainedModel) -> bool:
    ids = torch.tensor([[3, 4, 5, 6]])
    try:
        small = small_model(model).bfloat16()
        small(input_ids=ids, use_cache=False)
    except FAILURES:
        return True
    widen_residual(small)
    try:
        small(input_ids=ids, use_cache=False)
    except FAILURES as error:
        log.info(
            "%s runs without a float32 residual stream (fp32_residual), which its layers do not take: %s.",
            type(model).__name__,
            words_of(error),
        )
        return False
    return True
