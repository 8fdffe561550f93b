"""Which part of which Megatron parameter a Hugging Face weight is: one table for all families.

Fused parameters have the projections of queries, keys and values of this rank one after the other, and the
two halves of a gated feed-forward layer. A Hugging Face weight is therefore a range of rows of a parameter.
With tensor parallelism a rank has a contiguous range of rows (or columns) of each Hugging Face weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from strop.backends.megatron.latent import LatentAttention
from strop.backends.megatron.stage import StageChunk
from strop.backends.megatron.topology import Topology


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a parameter."""

    parameter: nn.Parameter
    start: int = 0
    stop: int | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """These rows of `tensor`, which has the shape of the parameter."""
        return tensor[self.start : self.stop]


@dataclass(frozen=True)
class Place:
    """Where this rank has its share of a Hugging Face weight."""

    part: Part
    dim: int | None = None
    """The dimension that is divided over tensor-parallel (or expert-parallel) ranks; None: every rank has all
    of it."""
    expert: bool = False
    partial_gradient: bool = False
    """Every tensor-parallel rank has a term of the gradient."""
    copy_of_other_stage: bool = False
    """The output head of the last stage, whose weight is the embedding of the first."""

    def read(self, source: Tensor | None = None) -> Tensor:
        """This rank's share of the parameter, or of `source`, which has its shape: a view."""
        tensor = self.part.parameter.detach() if source is None else source
        return self.part.view(tensor)


def places_of(chunks: Sequence[StageChunk], topology: Topology, *, scalar: bool) -> dict[str, Place]:
    """The places of all Hugging Face weights that this rank has, by name."""
    found: dict[str, Place] = {}
    for chunk in chunks:
        gpt = chunk.gpt
        rows = _real_rows(chunk, topology)
        if gpt.pre_process:
            table = Part(gpt.embedding.word_embeddings.weight, stop=rows)
            found["model.embed_tokens.weight"] = Place(table, dim=0)
        for layer in gpt.decoder.layers:
            prefix = f"model.layers.{layer.layer_number - 1}"
            for name, place in _layer(layer, chunk.divisor > 1):
                found[f"{prefix}.{name}"] = place
        if not gpt.post_process:
            continue
        norm = Part(gpt.decoder.final_layernorm.weight)
        found["model.norm.weight"] = Place(norm, partial_gradient=chunk.divisor > 1)
        if scalar:
            for name, parameter in gpt.output_layer.named_parameters():
                found[f"score.{name}"] = Place(Part(parameter))
        elif not chunk.tied:
            found["lm_head.weight"] = Place(Part(gpt.output_layer.weight, stop=rows), dim=0)
        elif not gpt.pre_process:
            head = Part(gpt.output_layer.weight, stop=rows)
            found["model.embed_tokens.weight"] = Place(head, dim=0, copy_of_other_stage=True)
    return found


def _real_rows(chunk: StageChunk, topology: Topology) -> int:
    """Rows of the vocabulary on this rank that are no padding."""
    share = -(-chunk.vocabulary // topology.sizes.tensor)
    return max(0, min(share, chunk.vocabulary - share * topology.tensor_rank))


def _layer(layer: Any, shares_tokens: bool) -> Iterator[tuple[str, Place]]:
    """Names inside a layer of Llama and its relatives. `shares_tokens`: between the divided matrices each
    tensor-parallel rank has some of the tokens."""
    attention = layer.self_attention
    if isinstance(attention, LatentAttention):
        yield from _latent_attention(attention, shares_tokens)
    else:
        yield from _attention(attention)
    before = Part(layer.input_layernorm.weight)
    yield "input_layernorm.weight", Place(before, partial_gradient=shares_tokens)
    between = Part(layer.pre_mlp_layernorm.weight)
    yield "post_attention_layernorm.weight", Place(between, partial_gradient=shares_tokens)
    yield from _feed_forward(layer.mlp, shares_tokens)


def _attention(attention: Any) -> Iterator[tuple[str, Place]]:
    size = attention.hidden_size_per_attention_head
    queries = attention.num_attention_heads_per_partition * size
    keys = queries + attention.num_query_groups_per_partition * size
    bounds = {"q_proj": (0, queries), "k_proj": (queries, keys), "v_proj": (keys, None)}
    for kind, parameter in attention.linear_qkv.named_parameters():
        for name, (start, stop) in bounds.items():
            yield f"self_attn.{name}.{kind}", Place(Part(parameter, start, stop), dim=0)
    yield "self_attn.o_proj.weight", Place(Part(attention.linear_proj.weight), dim=1)
    for name, norm in (("q_norm", attention.q_layernorm), ("k_norm", attention.k_layernorm)):
        for kind, parameter in norm.named_parameters() if norm is not None else ():
            # The norm of a head takes part in the heads of this rank alone.
            yield f"self_attn.{name}.{kind}", Place(Part(parameter), partial_gradient=True)


_LATENT_DIMS = {"q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}
"""Matrices of latent attention that are divided, and along which dimension."""


def _latent_attention(attention: LatentAttention, shares_tokens: bool) -> Iterator[tuple[str, Place]]:
    """Parts have the names of Hugging Face."""
    for name, parameter in attention.named_parameters():
        dim = _LATENT_DIMS.get(name.partition(".")[0])
        partial = shares_tokens and dim is None
        yield f"self_attn.{name}", Place(Part(parameter), dim=dim, partial_gradient=partial)


def _feed_forward(mlp: Any, shares_tokens: bool) -> Iterator[tuple[str, Place]]:
    experts = getattr(mlp, "experts", None)
    if experts is None:
        yield from _gated("mlp", mlp)
        return
    if mlp.shared_experts is not None:
        yield from _gated("mlp.shared_experts", mlp.shared_experts)
    yield "mlp.gate.weight", Place(Part(mlp.router.weight), partial_gradient=shares_tokens)
    yield "mlp.experts.gate_up_proj", Place(Part(experts.gate_up), dim=0, expert=True)
    yield "mlp.experts.down_proj", Place(Part(experts.down), dim=0, expert=True)


def _gated(prefix: str, mlp: Any) -> Iterator[tuple[str, Place]]:
    half = mlp.linear_fc1.weight.shape[0] // 2
    yield f"{prefix}.gate_proj.weight", Place(Part(mlp.linear_fc1.weight, stop=half), dim=0)
    yield f"{prefix}.up_proj.weight", Place(Part(mlp.linear_fc1.weight, start=half), dim=0)
    yield f"{prefix}.down_proj.weight", Place(Part(mlp.linear_fc2.weight), dim=1)
