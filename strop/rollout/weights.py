"""What engines that hold a Hugging Face module share: how long its sequences may be, and new weights by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from strop.registry import did_you_mean


def longest_sequence(model: Any, asked: int | None) -> int:
    """`asked`, or the model's own limit; asking for more than the model was built for is an error."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return int(limit) if limit else 1 << 20
    if asked < 2 or (limit and asked > limit):
        raise ValueError(
            f"max_model_len={asked}: the model takes from 2 to {limit or 'any number of'} positions. Prompt and response "
            "together must fit: lower data.max_prompt_length, data.max_response_length or rollout.max_model_len."
        )
    return asked


def copy_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each tensor into the parameter or buffer of that name; what already is that memory is left alone."""
    own = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    with torch.no_grad():
        for name, new in weights:
            if name not in own:
                raise ValueError(f"The model of the engine has no weight {name!r}.{did_you_mean(name, own)}")
            old = own[name]
            if old.shape != new.shape:
                raise ValueError(
                    f"The weight {name!r} has the shape {tuple(old.shape)} in the engine and {tuple(new.shape)} here."
                )
            if old.data_ptr() != new.data_ptr() or old.device != new.device:
                old.copy_(new)
