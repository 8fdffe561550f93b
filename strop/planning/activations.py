"""What a pass over a model keeps for its backward pass, and what it needs for a moment. Bytes on one rank.

The terms follow the operations of the models as transformers writes them (each keeps its inputs) and of `models/forward.py`,
or with `kernels` those of `models/kernels.py`. A test compares them with what torch really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.planning.assumptions import LOGITS, LOSS_BYTES
from strop.planning.shape import Shape

FLOAT32 = 4


@dataclass(frozen=True)
class Numbers:
    """Bytes of one number."""

    compute: int = 2
    """In matrix products."""
    master: int = 4
    """In the weights that the optimizer moves."""
    residual: int = 4
    """In the sum that runs through the layers: 4 with model.fp32_residual."""


@dataclass(frozen=True)
class Tokens:
    """A micro-batch on one rank."""

    all: int
    answered: int
    """Response tokens, whose states reach the head."""


def norm_kept(size: int, numbers: Numbers, *, kernels: bool = False) -> int:
    """Per token: the input in float32, the normalised input in its own dtype. A kernel keeps the input as it came."""
    return size * numbers.residual + (0 if kernels else FLOAT32 * (size + 1))


def layer_kept(shape: Shape, numbers: Numbers, *, sparse: bool = False, tensor: int = 1, kernels: bool = False) -> int:
    """Bytes per token that one layer keeps. `tensor` ranks share heads and inner sizes."""
    c = numbers.compute
    queries, keys = shape.queries // tensor, shape.keys // tensor
    norms = shape.norms * norm_kept(shape.hidden, numbers, kernels=kernels) + 2 * c * shape.hidden
    attention = c * (2 * queries + 2 * keys) + FLOAT32 * shape.heads // tensor
    if shape.head_norms:
        attention += (queries + keys) * c
        attention += 0 if kernels else FLOAT32 * (queries + keys + (shape.heads + shape.key_heads) // tensor)
    return norms + attention + mlp_kept(shape, numbers, sparse=sparse, tensor=tensor, kernels=kernels)


def mlp_kept(shape: Shape, numbers: Numbers, *, sparse: bool = False, tensor: int = 1, kernels: bool = False) -> int:
    """Gate, its activation, which a kernel does not keep, the other half and their product; of a mixture, for every expert a
    token visits."""
    c = numbers.compute
    if not sparse:
        return (3 if kernels else 4) * c * shape.width // tensor
    assert shape.experts is not None
    one = 4 * c * shape.experts.width // tensor + 2 * c * shape.hidden
    router = 2 * FLOAT32 * shape.experts.count
    return shape.experts.chosen * one + router + 4 * c * shape.experts.shared_width // tensor


def layers_kept(
    shape: Shape, tokens: int, numbers: Numbers, *, checkpointed: bool, tensor: int = 1, kernels: bool = False
) -> int:
    """All layers. Checkpointed, a layer keeps what enters it and nothing else."""
    if checkpointed:
        return tokens * shape.layers * numbers.residual * shape.hidden
    sparse = shape.sparse_layers
    layers = (shape.layers - sparse) * layer_kept(shape, numbers, tensor=tensor, kernels=kernels)
    if sparse:
        layers += sparse * layer_kept(shape, numbers, sparse=True, tensor=tensor, kernels=kernels)
    return tokens * layers


def end_kept(shape: Shape, tokens: Tokens, numbers: Numbers, *, kernels: bool = False) -> int:
    """Behind the layers: the last norm, the states that the head was given, a few numbers per response token for the loss."""
    width = FLOAT32 if shape.scalar else numbers.compute
    return tokens.all * norm_kept(shape.hidden, numbers, kernels=kernels) + tokens.answered * (
        width * shape.hidden + LOSS_BYTES
    )


def layer_backward(shape: Shape, tokens: int, numbers: Numbers, *, tensor: int = 1) -> int:
    """Beside what is kept: gradients under way in the backward pass of a layer, at its feed-forward part, and the gradient of
    the residual stream. The product of the two halves is gone by then."""
    width = shape.width if not shape.sparse_layers or shape.experts is None else shape.experts.width * shape.experts.chosen
    return tokens * (2 * numbers.compute * width // tensor + shape.hidden * (numbers.residual + numbers.compute))


def layer_forward(shape: Shape, tokens: int, numbers: Numbers, *, tensor: int = 1) -> int:
    """The largest moment of a layer without a backward pass: three inner tensors, or the rotation of queries and keys, or a
    norm in float32. Beside it: what the norm gave, and the residual stream as it is, as it entered the layer and the model."""
    c = numbers.compute
    width = shape.width if not shape.sparse_layers or shape.experts is None else shape.experts.width * shape.experts.chosen
    inner = max(3 * c * width // tensor, 4 * c * (shape.queries + shape.keys) // tensor, 3 * FLOAT32 * shape.hidden)
    return tokens * (inner + (3 * numbers.residual + c) * shape.hidden)


def logits_at_a_time(shape: Shape, answered: int) -> int:
    rows = min(answered, max(1, LOGITS // shape.vocabulary))
    return rows * shape.vocabulary * FLOAT32


def head_forward(
    shape: Shape, tokens: Tokens, numbers: Numbers, *, entropy: bool, tempered: bool, kernels: bool = False
) -> int:
    """Logits of a chunk. Without kernels a shifted copy, its powers where entropy is wanted, and a scaled copy at temperatures
    but 1."""
    states = tokens.all * numbers.residual * shape.hidden + tokens.answered * numbers.compute * shape.hidden
    if shape.scalar:
        return states
    copies = 1 if kernels else 2 + entropy + tempered
    return states + logits_at_a_time(shape, tokens.answered) * copies


def head_backward(
    shape: Shape, tokens: Tokens, numbers: Numbers, *, entropy: bool, trained: bool, kernels: bool = False
) -> int:
    """Logits and 16-bit slopes of a chunk; without kernels float32 slopes too. The gradient of the head in float32; the
    gradient of the states. `entropy`: the loss uses it, so it has a slope."""
    states = tokens.answered * numbers.compute * shape.hidden
    if shape.scalar:
        return states * 2
    chunk = logits_at_a_time(shape, tokens.answered)
    slopes = chunk + chunk * numbers.compute // FLOAT32 + (0 if kernels else (1 + entropy) * chunk)
    return states + slopes + FLOAT32 * shape.embedding * trained
