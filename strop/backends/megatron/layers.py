"""Parts of a layer that megatron-core builds by its layer specification: norms, attention, feed-forward.

megatron-core's own attention takes packed rows only with Transformer Engine. `PackedCoreAttention` is the
`core_attention` of the specification instead, so rows are packed as in the other backends, with common
prefixes computed once. Norms, gates and rotations are the kernels of models/kernels.py on a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.backends.megatron.library import megatron
from strop.models.attention import packed_attention
from strop.models.fused_modules import has_kernels
from strop.models.packing import Packing
from strop.models.self_check import same


class LayerConfig(Protocol):
    """What our layers read of a TransformerConfig."""

    hidden_size: int
    ffn_hidden_size: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int | None
    kv_channels: int
    params_dtype: torch.dtype
    use_cpu_initialization: bool
    init_method: Callable[[Tensor], Tensor]
    strop_windows: list[int | None] | None
    """Sliding window of each layer; added by `build_chunks`."""


def storage_of(config: LayerConfig) -> dict[str, Any]:
    """Where parameters are made, and in which precision."""
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    return {"dtype": config.params_dtype, "device": device}


# --- attention ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedRow:
    """Passed through megatron-core as `packed_seq_params`. Its format is none that the library knows, so the
    library leaves queries and keys alone."""

    packing: Packing
    tokens: int
    """The row without the padding that tensor-parallel ranks need to share it equally."""
    cos: Tensor
    """[1, N, D], and the sines, of the positions of these tokens."""
    sin: Tensor
    home: ModuleType
    """The Python module of the Hugging Face model, which has the rotary function."""
    qkv_format: str = "strop"


class PackedCoreAttention(nn.Module):
    """Rotation of queries and keys, then causal attention inside each sequence of a packed row."""

    def __init__(self, config: LayerConfig, layer_number: int, **_: object):
        super().__init__()
        self.scaling = config.kv_channels**-0.5
        self.window = None
        if config.strop_windows is not None:
            self.window = config.strop_windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **_: object,
    ) -> Tensor:
        """query [N, 1, heads, D], key and value [N, 1, groups, D] -> [N, 1, heads x D]."""
        row = packed_seq_params
        q, k, v = (states[: row.tokens].permute(1, 2, 0, 3) for states in (query, key, value))
        q, k = row.home.apply_rotary_pos_emb(q, k, row.cos, row.sin)
        out, _none = packed_attention(
            *(self, q, k, v, None),
            packing=row.packing,
            scaling=self.scaling,
            sliding_window=self.window,
        )
        return padded_rows(out.reshape(row.tokens, 1, -1), query.shape[0])


def padded_rows(states: Tensor, rows: int) -> Tensor:
    """`states` [n, 1, H] with zeros up to so many rows."""
    if rows == len(states):
        return states  # F.pad would copy them
    return F.pad(states, (0, 0, 0, 0, 0, rows - len(states)))


@functools.cache
def plain_self_attention() -> Any:
    """The attention module of megatron-core with another order of rows in its fused projection: all queries
    of this rank, then all keys, then all values. The library's own order, group of heads by group, makes it
    copy the queries of every token out of the product."""
    library = megatron("transformer.attention").SelfAttention

    class PlainSelfAttention(library):  # type: ignore[misc, valid-type] # imported when it is used
        def get_query_key_value_tensors(
            self, hidden_states: Tensor, *_: object, **__: object
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Queries [N, 1, heads, D], keys and values [N, 1, groups, D]."""
            keys = self.num_query_groups_per_partition
            counts = [self.num_attention_heads_per_partition, keys, keys]
            product = self.linear_qkv(hidden_states)[0]
            heads = product.unflatten(-1, (sum(counts), self.hidden_size_per_attention_head))
            query, key, value = heads.split(counts, -2)
            if self.q_layernorm is not None:
                query = self.q_layernorm(query)
            if self.k_layernorm is not None:
                key = self.k_layernorm(key)
            return query, key, value

    return PlainSelfAttention


def home_of(skeleton: Any) -> ModuleType:
    """The Python module of the layers of a Hugging Face model. A model with a scalar head is a class of ours
    around them."""
    return sys.modules[type(skeleton.model).__module__]


# --- norms and residual sums --------------------------------------------------------------------------------


class TokenRMSNorm(nn.Module):
    """The norm as transformers computes it: in float32, then the weight in the dtype of the model."""

    def __init__(self, config: LayerConfig, hidden_size: int, eps: float = 1e-6, **_: object):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, **storage_of(config)))
        self.eps = float(eps)

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(self.weight.dtype)


def residual_sum(training: bool, fused: bool) -> Callable[..., Tensor]:
    """The function that adds a branch to the residual stream, in the precision of the stream. The one of
    megatron-core rounds the stream first."""

    def add(branch: tuple[Tensor, Tensor | None], stream: Tensor, dropout: float) -> Tensor:
        states, bias = branch
        assert bias is None and not dropout, "our layers have neither"
        return stream + states

    return add


# --- feed-forward -------------------------------------------------------------------------------------------


def gated_silu(both: Tensor) -> Tensor:
    """silu(gate) * up of [..., gate and up], by a kernel where it gives the same numbers."""
    if has_kernels(both.device, both.dtype) and _gate_kernel_is_right(both.device, both.dtype):
        return _gate_kernel()(both)
    return _plain_gate(both)


def _plain_gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _gate_kernel() -> Callable[[Tensor], Tensor]:
    from strop.models import kernels

    kernel: Callable[[Tensor], Tensor] = kernels.gated_silu_halves
    return kernel


@functools.cache
def _gate_kernel_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    both, above = (torch.randn(9, size, generator=draw).to(device, dtype) for size in (96, 48))

    def answers(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            given = both.clone().requires_grad_()
            out = function(given)
            return [out, *torch.autograd.grad(out, given, above)]

    return same(lambda: answers(_plain_gate), lambda: answers(_gate_kernel()))


class GatedMlp(nn.Module):
    """down(silu(gate) * up), with gate and up as one product."""

    def __init__(self, config: LayerConfig, width: int | None = None):
        super().__init__()
        width = width or config.ffn_hidden_size
        layers = megatron("tensor_parallel")
        shared: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": True,
            "tp_group": megatron("parallel_state").get_tensor_model_parallel_group(),
        }
        self.linear_fc1 = layers.ColumnParallelLinear(
            config.hidden_size, 2 * width, gather_output=False, **shared
        )
        self.linear_fc2 = layers.RowParallelLinear(
            width, config.hidden_size, input_is_parallel=True, **shared
        )

    def forward(self, states: Tensor, **_: object) -> tuple[Tensor, None]:
        return self.linear_fc2(gated_silu(self.linear_fc1(states)[0]))[0], None


class SharedExpert(GatedMlp):
    """The expert that every token visits."""

    def __init__(self, config: LayerConfig, **_: object):
        super().__init__(config, config.moe_shared_expert_intermediate_size)

    def forward(self, states: Tensor, **_: object) -> Tensor:  # type: ignore[override] # as the library's
        return super().forward(states)[0]


class GroupedExperts(nn.Module):
    """The experts of this rank. Weights have the layout of Hugging Face's fused ones, and each of the two
    products is one call for all experts."""

    def __init__(self, count: int, config: LayerConfig, **_: object):
        super().__init__()
        hidden = config.hidden_size
        width = config.moe_ffn_hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden, **storage_of(config)))
        self.down = nn.Parameter(torch.empty(count, hidden, width, **storage_of(config)))

    def forward(self, states: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`states` [n, H] are sorted by expert; `probs` [n] are their weights in the sum."""
        ends = tokens_per_expert.to(states.device).cumsum(0, dtype=torch.int32)
        inner = gated_silu(grouped_products(states, self.gate_up, ends)) * probs[:, None]
        return grouped_products(inner.to(states.dtype), self.down, ends), None


def grouped_products(states: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows of `states` [n, in] up to each end, times the weight [out, in] of their group."""
    if all(size * states.element_size() % 16 == 0 for size in weights.shape[1:]):
        return F.grouped_mm(states, weights.transpose(-2, -1), offs=ends)
    bounds = [0, *ends.tolist()]
    parts = [
        F.linear(states[start:end], weight)
        for weight, start, end in zip(weights, bounds, bounds[1:], strict=False)
    ]
    return torch.cat(parts)
