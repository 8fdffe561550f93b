"""Activations: what a pass over a model keeps for its backward pass, and what it allocates temporarily. Bytes
on one rank.

The terms follow the operations of the models in transformers (each keeps its inputs) and of
`models/forward.py`, or with `kernels` those of the Triton kernels. A test compares them with what torch
really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.planning.devices import LOGITS, LOSS_BYTES
from strop.planning.shape import Shape

FLOAT32 = 4


@dataclass(frozen=True)
class Numbers:
    """Bytes of one number."""

    compute: int = 2
    """In matrix products."""
    master: int = 4
    """In the weights that the optimizer updates."""
    residual: int = 4
    """In the residual stream: 4 with model.fp32_residual."""


@dataclass(frozen=True)
class Tokens:
    """A micro-batch on one rank."""

    all: int
    answered: int
    """Response tokens, whose hidden states go through the head."""


def norm_kept(size: int, numbers: Numbers, *, kernels: bool = False) -> int:
    """Bytes per token: the input, and without a kernel the normalised input and its scale in float32."""
    kept = size * numbers.residual
    if not kernels:
        kept += FLOAT32 * (size + 1)
    return kept


def layer_kept(
    shape: Shape, numbers: Numbers, *, sparse: bool = False, tensor: int = 1, kernels: bool = False
) -> int:
    """Bytes per token that one layer keeps. `tensor` ranks share heads and inner sizes."""
    c = numbers.compute
    queries = shape.queries // tensor
    keys = shape.keys // tensor
    norms = shape.norms * norm_kept(shape.hidden, numbers, kernels=kernels) + 2 * c * shape.hidden
    attention = c * (2 * queries + 2 * keys) + FLOAT32 * shape.heads // tensor
    if shape.head_norms:
        attention += (queries + keys) * c
        if not kernels:
            attention += FLOAT32 * (queries + keys + (shape.heads + shape.key_heads) // tensor)
    return norms + attention + mlp_kept(shape, numbers, sparse=sparse, tensor=tensor, kernels=kernels)


def mlp_kept(
    shape: Shape, numbers: Numbers, *, sparse: bool = False, tensor: int = 1, kernels: bool = False
) -> int:
    """Bytes per token of a feed-forward layer: gate, its activation (not with a kernel), up projection and
    their product. In a mixture of experts, for every expert that a token is routed to."""
    c = numbers.compute
    if not sparse:
        tensors = 4
        if kernels:
            tensors = 3
        return tensors * c * shape.width // tensor
    assert shape.experts is not None
    one = 4 * c * shape.experts.width // tensor + 2 * c * shape.hidden
    router = 2 * FLOAT32 * shape.experts.count
    return shape.experts.chosen * one + router + 4 * c * shape.experts.shared_width // tensor


def layers_kept(
    shape: Shape,
    tokens: int,
    numbers: Numbers,
    *,
    checkpointing: str = "none",
    tensor: int = 1,
    kernels: bool = False,
) -> int:
    """Bytes that all layers keep, by model.gradient_checkpointing: with `full` the input of each layer, with
    `selective` everything but the inside of the feed-forward part."""
    if checkpointing == "full":
        return tokens * shape.layers * numbers.residual * shape.hidden
    sparse = shape.sparse_layers
    kept = 0
    for count, is_sparse in ((shape.layers - sparse, False), (sparse, True)):
        if count:
            one = layer_kept(shape, numbers, sparse=is_sparse, tensor=tensor, kernels=kernels)
            if checkpointing == "selective":
                one -= mlp_kept(shape, numbers, sparse=is_sparse, tensor=tensor, kernels=kernels)
            kept += count * one
    return tokens * kept


def recomputed(
    shape: Shape, numbers: Numbers, *, checkpointing: str, tensor: int = 1, kernels: bool = False
) -> int:
    """Bytes per token that one layer computes again in the backward pass."""
    sparse = shape.sparse_layers > 0
    if checkpointing == "selective":
        return mlp_kept(shape, numbers, sparse=sparse, tensor=tensor, kernels=kernels)
    if checkpointing == "full":  # its input is kept already
        whole = layer_kept(shape, numbers, sparse=sparse, tensor=tensor, kernels=kernels)
        return whole - numbers.residual * shape.hidden
    return 0


def end_kept(shape: Shape, tokens: Tokens, numbers: Numbers, *, kernels: bool = False) -> int:
    """Bytes kept after the layers: the last norm, the input of the head, and a few numbers per response token
    for the loss."""
    width = numbers.compute
    if shape.scalar:
        width = FLOAT32
    norm = tokens.all * norm_kept(shape.hidden, numbers, kernels=kernels)
    return norm + tokens.answered * (width * shape.hidden + LOSS_BYTES)


def _inner_width(shape: Shape) -> int:
    """Inner size of a feed-forward layer that one token uses."""
    if not shape.sparse_layers or shape.experts is None:
        return shape.width
    return shape.experts.width * shape.experts.chosen


def layer_backward(shape: Shape, tokens: int, numbers: Numbers, *, tensor: int = 1) -> int:
    """Temporary bytes of the backward pass of a layer: gradients in its feed-forward part, and the gradient
    of the residual stream. The product of gate and up projection is freed by then."""
    inner = 2 * numbers.compute * _inner_width(shape) // tensor
    return tokens * (inner + shape.hidden * (numbers.residual + numbers.compute))


def layer_forward(shape: Shape, tokens: int, numbers: Numbers, *, tensor: int = 1) -> int:
    """The peak of a layer without a backward pass: three inner tensors, or the rotary embedding of queries
    and keys, or a norm in float32. In addition: the output of the norm, and the residual stream now, at the
    input of the layer and at the input of the model."""
    c = numbers.compute
    feed_forward = 3 * c * _inner_width(shape) // tensor
    rotary = 4 * c * (shape.queries + shape.keys) // tensor
    norm = 3 * FLOAT32 * shape.hidden
    inner = max(feed_forward, rotary, norm)
    return tokens * (inner + (3 * numbers.residual + c) * shape.hidden)


def logits_at_a_time(shape: Shape, answered: int) -> int:
    """Bytes of the float32 logits of one chunk of response tokens."""
    rows = min(answered, max(1, LOGITS // shape.vocabulary))
    return rows * shape.vocabulary * FLOAT32


def head_forward(
    shape: Shape, tokens: Tokens, numbers: Numbers, *, entropy: bool, tempered: bool, kernels: bool = False
) -> int:
    """Temporary bytes of the head: logits of a chunk. Without kernels also a shifted copy, its exponentials
    if entropy is computed, and a scaled copy if the temperature is not 1."""
    states = tokens.all * numbers.residual * shape.hidden + tokens.answered * numbers.compute * shape.hidden
    if shape.scalar:
        return states
    copies = 1
    if not kernels:
        copies += 1 + entropy + tempered
    return states + logits_at_a_time(shape, tokens.answered) * copies


def head_backward(
    shape: Shape, tokens: Tokens, numbers: Numbers, *, entropy: bool, trained: bool, kernels: bool = False
) -> int:
    """Temporary bytes of the head's backward pass: logits and 16-bit gradients of a chunk, without kernels
    float32 gradients too; the gradient of the head in float32; the gradient of the hidden states. `entropy`:
    the loss uses it, so it has a gradient."""
    states = tokens.answered * numbers.compute * shape.hidden
    if shape.scalar:
        return states * 2
    chunk = logits_at_a_time(shape, tokens.answered)
    logits = chunk + chunk * numbers.compute // FLOAT32
    if not kernels:
        logits += (1 + entropy) * chunk
    return states + logits + FLOAT32 * shape.embedding * trained
