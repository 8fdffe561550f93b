"""Gradient checkpointing: which activations of a layer wait for the backward pass, and which are computed
again.

- `full`: a layer keeps its input alone, and all of it is computed again.
- `selective`: attention keeps what it needs, and the feed-forward part is computed again. Its inner tensors
  are most of what a layer keeps, and it costs the same for each token, whereas attention costs more the
  longer a sequence is.

The numbers are those of a pass without checkpointing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.models.lora import base_model
from strop.models.residual import AddingLinear

log = logging.getLogger(__name__)

Checkpointing = Literal["none", "full", "selective"]
FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe")
"""Names of the feed-forward part of a layer."""


def checkpoint_activations(model: PreTrainedModel, mode: Checkpointing = "full") -> None:
    """Turn gradient checkpointing on. `model.gradient_checkpointing_disable()` turns it off."""
    if mode == "none":
        return
    if not base_model(model).supports_gradient_checkpointing:
        raise ValueError(
            f"{type(base_model(model)).__name__} does not support gradient checkpointing. Set "
            "model.enable_gradient_checkpointing=false."
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if mode == "full":
        return
    layers = checkpointed_layers(model)
    found = 0
    for layer in layers:
        part = feed_forward_of(layer)
        if part is not None:
            layer._gradient_checkpointing_func = partial(_selective, part)  # type: ignore[assignment]
            found += 1
    if not layers or found < len(layers):
        log.warning(
            "gradient_checkpointing=selective: %d of %d layers of %s have a part called %s. The others are "
            "computed again as a whole.",
            *(found, len(layers), type(model).__name__, " or ".join(FEED_FORWARD)),
        )


def checkpointing_mode(model: nn.Module) -> Checkpointing:
    """How the layers of a model are checkpointed."""
    layers = checkpointed_layers(model)
    if not layers:
        return "none"
    chosen = getattr(layers[0], "_gradient_checkpointing_func", None)
    return "selective" if isinstance(chosen, partial) and chosen.func is _selective else "full"


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of which each is a unit of gradient checkpointing."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing]


@contextmanager
def keep_small(layers: Sequence[nn.Module], tokens: int, limit: int) -> Iterator[None]:
    """Inside it nothing is computed again if `tokens` over all checkpointed layers are at most `limit`: their
    activations are then not more than what one layer computes again for a micro-batch of `limit` tokens."""
    small = tokens * len(layers) <= limit
    for layer in layers:
        layer.gradient_checkpointing = not small  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True  # type: ignore[assignment]


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    """The feed-forward part of a layer, if it has one of the usual names."""
    children = dict(layer.named_children())
    for name in FEED_FORWARD:
        if name in children:
            return children[name]
    return None


def _selective(part: nn.Module, layer: Callable[..., Any], *args: object) -> object:
    """Call a layer of which `part` is computed again in the backward pass."""
    with _recomputed(part):
        return layer(*args)


@contextmanager
def _recomputed(part: nn.Module) -> Iterator[None]:
    """Inside it the forward of `part` is checkpointed. The attribute is set for the time of the call only, so
    that patches, the rollout engine and a shard of FSDP2 find the module as it is."""
    attributes = vars(part)
    own = attributes.get("forward")
    attributes["forward"] = partial(_forward, part, part.forward)
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own


def _forward(part: nn.Module, forward: Callable[..., Tensor], *args: object, **kwargs: object) -> object:
    """A product that adds to the residual stream takes the stream from an attribute, which it empties: it is
    an input of what is computed again."""
    adding = [linear for linear in part.modules() if isinstance(linear, AddingLinear)]
    streams = [linear.__dict__.pop("stream", None) for linear in adding]
    count = len(streams)

    def run(*inputs: Any) -> object:
        for linear, stream in zip(adding, inputs[:count], strict=True):
            if stream is not None:
                linear.stream = stream
        return forward(*inputs[count:], **kwargs)

    return checkpoint(run, *streams, *args, use_reentrant=False)
