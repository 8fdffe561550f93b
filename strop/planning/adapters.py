"""The number of weights of LoRA adapters: those of peft for target_modules=all-linear.

An adapter of a matrix has rank x (inputs + outputs) weights. peft adapts experts and routers as parameters in
families whose experts transformers stores in one tensor; it then leaves out the other feed-forward layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.planning.shape import Experts, Latents, Shape


@dataclass(frozen=True)
class AdaptedMatrix:
    """A linear layer with an adapter."""

    inputs: int
    outputs: int
    divided: str = ""
    """What tensor-parallel ranks divide: `inputs`, `outputs`, or nothing."""

    def weights(self, rank: int, tensor: int = 1) -> int:
        """Of A and B on one of `tensor` ranks: the side that is not divided is whole on each."""
        inputs = self.inputs
        outputs = self.outputs
        if self.divided == "inputs":
            inputs //= tensor
        elif self.divided == "outputs":
            outputs //= tensor
        return rank * (inputs + outputs)


def adapter_weights(shape: Shape, rank: int) -> int:
    """Weights of the adapters of all layers."""
    dense = shape.layers - shape.sparse_layers
    sparse = 0
    if shape.experts is not None:
        sparse = sparse_layer_adapters(shape, shape.experts, rank)
        sparse += expert_adapters(shape, rank)
    return (
        shape.layers * _sum(attention_matrices(shape), rank)
        + dense * _sum(dense_matrices(shape), rank)
        + shape.sparse_layers * sparse
    )


def dense_adapters(shape: Shape, rank: int, layers: int, sparse_layers: int, tensor: int) -> int:
    """Weights of the adapters of `layers` layers on one tensor-parallel rank, without those of experts."""
    sparse = 0
    if shape.experts is not None:
        sparse = sparse_layer_adapters(shape, shape.experts, rank, tensor)
    return (
        layers * _sum(attention_matrices(shape), rank, tensor)
        + (layers - sparse_layers) * _sum(dense_matrices(shape), rank, tensor)
        + sparse_layers * sparse
    )


def sparse_layer_adapters(shape: Shape, experts: Experts, rank: int, tensor: int = 1) -> int:
    """Of the feed-forward part of a layer with experts, without the experts: the router, or the expert that
    every token visits."""
    if experts.adapted:
        return rank * (shape.hidden + experts.count)
    if not experts.shared_width:
        return 0
    gate = rank * (shape.hidden + 1) * experts.shared_gate
    return gate + _sum(_gated(shape, experts.shared_width), rank, tensor)


def expert_adapters(shape: Shape, rank: int, parts: int = 1) -> int:
    """Of the experts of one layer, on one of `parts` ranks: A of its own experts, B of all. Gate and up are
    one matrix with twice the rank."""
    experts = shape.experts
    if experts is None or not experts.adapted:
        return 0
    own = 2 * rank * shape.hidden + rank * experts.width
    others = 2 * rank * 2 * experts.width + rank * shape.hidden
    return experts.count // parts * own + experts.count * others


def attention_matrices(shape: Shape) -> Iterator[AdaptedMatrix]:
    if shape.latents is not None:
        yield from _latent_matrices(shape, shape.latents)
        return
    if shape.fused:
        yield AdaptedMatrix(shape.hidden, shape.queries + 2 * shape.keys, "outputs")
    else:
        for outputs in (shape.queries, shape.keys, shape.keys):
            yield AdaptedMatrix(shape.hidden, outputs, "outputs")
    yield AdaptedMatrix(shape.queries, shape.hidden, "inputs")


def _latent_matrices(shape: Shape, latents: Latents) -> Iterator[AdaptedMatrix]:
    source = shape.hidden
    if latents.queries:
        yield AdaptedMatrix(shape.hidden, latents.queries)
        source = latents.queries
    yield AdaptedMatrix(source, shape.heads * (latents.plain + latents.rotary), "outputs")
    yield AdaptedMatrix(shape.hidden, latents.keys + latents.rotary)
    yield AdaptedMatrix(latents.keys, shape.heads * (latents.plain + latents.values), "outputs")
    yield AdaptedMatrix(shape.heads * latents.values, shape.hidden, "inputs")


def dense_matrices(shape: Shape) -> Iterator[AdaptedMatrix]:
    """Of a feed-forward layer without experts."""
    if shape.experts is None or not shape.experts.adapted:
        yield from _gated(shape, shape.width)


def _gated(shape: Shape, width: int) -> Iterator[AdaptedMatrix]:
    if shape.fused:
        yield AdaptedMatrix(shape.hidden, 2 * width, "outputs")
    else:
        yield AdaptedMatrix(shape.hidden, width, "outputs")
        yield AdaptedMatrix(shape.hidden, width, "outputs")
    yield AdaptedMatrix(width, shape.hidden, "inputs")


def _sum(matrices: Iterator[AdaptedMatrix], rank: int, tensor: int = 1) -> int:
    return sum(matrix.weights(rank, tensor) for matrix in matrices)
