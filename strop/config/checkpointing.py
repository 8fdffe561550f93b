"""Which activations of a model are computed again in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from strop.config.schema.model import ModelConfig


def checkpointing_of(model: ModelConfig) -> Literal["none", "full", "selective"]:
    """Which activations a model computes again in the backward pass."""
    if model.gradient_checkpointing is not None:
        return cast(Literal["none", "full", "selective"], model.gradient_checkpointing)
    return "full" if model.enable_gradient_checkpointing else "none"
