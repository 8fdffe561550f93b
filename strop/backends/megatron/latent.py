"""Multi-head latent attention (DeepSeek-V3) of packed rows, from megatron-core's divided matrices.

megatron-core's own module rotates by the place in the row, which is no position where several sequences are
packed. Down-projections to the latent space are whole on every rank; heads are divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.backends.megatron.layers import LayerConfig, PackedRow, TokenRMSNorm, padded_rows, storage_of
from strop.backends.megatron.library import megatron
from strop.models.attention import packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORM_EPS = 1e-6
"""Of the norms in the latent space, whatever rms_norm_eps says."""


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention."""

    heads: int
    query_rank: int | None
    """None: queries are projected from the hidden states."""
    key_rank: int
    plain: int
    """Size of the part of a query or key that is not rotated."""
    rotated: int
    value: int
    scaling: float
    rotary: str
    """Name of the rotary function in the Python module of the model."""


def latent_shape(config: PreTrainedConfig, attention: Any) -> LatentShape:
    """Of a configuration and one of the attention modules of its model."""
    interleaved = getattr(config, "rope_interleave", False)
    return LatentShape(
        heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        key_rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotated=config.qk_rope_head_dim,
        value=config.v_head_dim,
        scaling=float(attention.scaling),
        rotary="apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb",
    )


class LatentConfig(LayerConfig):
    """What latent attention reads of a TransformerConfig."""

    sequence_parallel: bool
    strop_latent: LatentShape


class WholeLinear(nn.Module):
    """A matrix that every rank has."""

    def __init__(self, config: LatentConfig, inputs: int, outputs: int):
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **storage_of(config)))

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight)


class LatentAttention(nn.Module):
    """The `self_attention` of a layer."""

    def __init__(self, config: LatentConfig, layer_number: int, **_: object):
        super().__init__()
        self.shape = shape = config.strop_latent
        self.shares_tokens = config.sequence_parallel
        parallel = megatron("tensor_parallel")
        group = megatron("parallel_state").get_tensor_model_parallel_group()
        self.group = group
        self.heads = shape.heads // group.size()
        shared: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": True,
            "tp_group": group,
        }

        def divided(inputs: int, outputs: int) -> Any:
            return parallel.ColumnParallelLinear(inputs, outputs, gather_output=False, **shared)

        hidden = config.hidden_size
        queries = shape.heads * (shape.plain + shape.rotated)
        if shape.query_rank is None:
            self.q_proj = divided(hidden, queries)
        else:
            self.q_a_proj = WholeLinear(config, hidden, shape.query_rank)
            self.q_a_layernorm = TokenRMSNorm(config, shape.query_rank, _NORM_EPS)
            self.q_b_proj = divided(shape.query_rank, queries)
        self.kv_a_proj_with_mqa = WholeLinear(config, hidden, shape.key_rank + shape.rotated)
        self.kv_a_layernorm = TokenRMSNorm(config, shape.key_rank, _NORM_EPS)
        self.kv_b_proj = divided(shape.key_rank, shape.heads * (shape.plain + shape.value))
        self.o_proj = parallel.RowParallelLinear(
            shape.heads * shape.value, hidden, input_is_parallel=True, **shared
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedRow, **_: object
    ) -> tuple[Tensor, None]:
        """hidden_states [N, 1, H]; with sequence parallelism this rank's tokens."""
        shape = self.shape
        row = packed_seq_params
        if shape.query_rank is None:
            queries = self.q_proj(hidden_states)[0]
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))[0]
        latent, rotated = self.kv_a_proj_with_mqa(hidden_states).split([shape.key_rank, shape.rotated], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent))[0]
        rotated = self._of_all_tokens(rotated)
        length = len(queries)
        q = self._by_head(queries, row.tokens)
        key_values = self._by_head(both, row.tokens)
        q_plain, q_rotated = q.split([shape.plain, shape.rotated], -1)
        k_plain, v = key_values.split([shape.plain, shape.value], -1)
        k_rotated = rotated[: row.tokens].permute(1, 0, 2)[:, None]
        rotate = getattr(row.home, shape.rotary)
        q_rotated, k_rotated = rotate(q_rotated, k_rotated, row.cos, row.sin)
        q = torch.cat([q_plain, q_rotated], -1)
        k = torch.cat([k_plain, k_rotated.expand(-1, self.heads, -1, -1)], -1)
        out, _none = packed_attention(
            *(self, q, k, v, None), packing=row.packing, scaling=shape.scaling, sliding_window=None
        )
        return self.o_proj(padded_rows(out.reshape(row.tokens, 1, -1), length))[0], None

    def _by_head(self, states: Tensor, tokens: int) -> Tensor:
        """[N, 1, heads x D] -> [1, heads, tokens, D]."""
        return states[:tokens].unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)

    def _of_all_tokens(self, states: Tensor) -> Tensor:
        """The rotated part of keys, which all heads share: gradients of the heads of all ranks add up."""
        if self.group.size() == 1:
            return states
        parallel = megatron("tensor_parallel")
        if self.shares_tokens:
            gathered: Tensor = parallel.gather_from_sequence_parallel_region(states, group=self.group)
            return gathered
        copied: Tensor = parallel.copy_to_tensor_model_parallel_region(states, group=self.group)
        return copied
