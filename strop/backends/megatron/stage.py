"""The layers of one pipeline stage: megatron-core's GPTModel with our norms and packed attention.

megatron-core's own attention takes packed rows only with Transformer Engine. `PackedCoreAttention` is the
`core_attention` of the layer specification instead, so rows are packed as in the other backends, with common
prefixes computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.backends.megatron.library import megatron
from strop.backends.megatron.shape import padded_vocabulary, transformer_config
from strop.backends.megatron.topology import Sizes, Topology
from strop.config.megatron import FAMILIES
from strop.models.attention import packed_attention
from strop.models.packing import Inputs, Packing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LayerConfig(Protocol):
    """What our layers read of a TransformerConfig."""

    kv_channels: int
    params_dtype: torch.dtype
    use_cpu_initialization: bool
    strop_windows: list[int | None] | None
    """Sliding window of each layer; added by `build_chunks`."""


@dataclass(frozen=True)
class PackedRow:
    """Passed through megatron-core as `packed_seq_params`. Its format is none that the library knows, so the
    library leaves queries and keys alone."""

    packing: Packing
    tokens: int
    """The row without the padding that tensor-parallel ranks need to share it equally."""
    qkv_format: str = "strop"


class PackedCoreAttention(nn.Module):
    """Causal attention inside each sequence of a packed row."""

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
        tokens = packed_seq_params.tokens
        q, k, v = (states[:tokens].permute(1, 2, 0, 3) for states in (query, key, value))
        out, _none = packed_attention(
            *(self, q, k, v, None),
            packing=packed_seq_params.packing,
            scaling=self.scaling,
            sliding_window=self.window,
        )
        return F.pad(out.reshape(tokens, 1, -1), (0, 0, 0, 0, 0, query.shape[0] - tokens))


class TokenNorm(nn.Module):
    """RMSNorm as transformers computes it: the norm in float32, then the weight in the dtype of the model."""

    def __init__(self, config: LayerConfig, hidden_size: int, eps: float = 1e-6, **_: object):
        super().__init__()
        device = None
        if not config.use_cpu_initialization:
            device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps

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


class StageChunk:
    """Consecutive layers of the model, with the embedding or the output head where they belong."""

    def __init__(self, gpt: Any, skeleton: Any, topology: Topology):
        self.gpt = gpt
        self.rotary: nn.Module = skeleton.model.rotary_emb
        self.padding: int | None = skeleton.get_input_embeddings().padding_idx
        """The token whose embedding gets no gradient."""
        self.vocabulary = int(skeleton.config.vocab_size)
        self.tied = bool(skeleton.config.tie_word_embeddings)
        self.divisor = 1
        """Tensor-parallel ranks that share the tokens between matrices (sequence parallelism)."""
        self.place = 0
        if gpt.config.sequence_parallel:
            self.divisor = topology.sizes.tensor
            self.place = topology.tensor_rank

    def run(self, inputs: Inputs, length: int = 0) -> Tensor:
        """Hidden states [N, 1, H]: those of the last layer (normed) on the last chunk. The row is padded to
        `length`, if it is shorter, and to a multiple of `divisor`."""
        assert inputs.packing is not None
        tokens = inputs.ids.shape[1]
        missing = self.padded(max(tokens, length)) - tokens
        ids = F.pad(inputs.ids, (0, missing))
        positions = F.pad(inputs.positions, (0, missing))
        hidden = None
        if self.gpt.pre_process:
            hidden = self.gpt.embedding(input_ids=ids, position_ids=positions)
            if self.padding is not None:
                own = ids.chunk(self.divisor, 1)[self.place] == self.padding
                hidden = hidden.detach().where(own.T[..., None], hidden)
        states: Tensor = self.gpt.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._angles(positions),
            packed_seq_params=PackedRow(inputs.packing, tokens),
        )
        if self.gpt.post_process and self.divisor > 1:
            # The gradient of the whole row is the same on all ranks: each takes its own tokens of it.
            states = megatron("tensor_parallel").gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=False
            )
        return states

    def padded(self, tokens: int) -> int:
        """The next multiple of `divisor`."""
        return -(-tokens // self.divisor) * self.divisor

    def _angles(self, positions: Tensor) -> Tensor:
        """[N, 1, 1, D] of the tokens at these positions."""
        frequencies = self.rotary.inv_freq
        assert isinstance(frequencies, Tensor)
        half = positions[0, :, None].float() * frequencies.float()[None]
        return torch.cat([half, half], -1)[:, None, None]

    def head_weight(self) -> Tensor:
        """This rank's rows of the output head, padding included."""
        if self.tied and self.gpt.pre_process:
            weight: Tensor = self.gpt.embedding.word_embeddings.weight
        else:
            weight = self.gpt.output_layer.weight
        return weight


def build_chunks(
    skeleton: Any,
    topology: Topology,
    *,
    dtype: torch.dtype,
    head_dtype: torch.dtype,
    device: torch.device,
    scalar: bool,
    wide_residual: bool,
    options: dict[str, Any],
) -> list[StageChunk]:
    """The chunks of this rank, of the model whose Hugging Face module is `skeleton`. `scalar`: it has a
    scalar head instead of a vocabulary."""
    sizes = topology.sizes
    config = skeleton.config
    settings = transformer_config(
        config, sizes, dtype=dtype, wide_residual=wide_residual, on_gpu=device.type == "cuda", **options
    )
    settings.strop_windows = _windows(config)
    skeleton.model.rotary_emb.to(device)
    chunks = []
    for virtual in range(sizes.virtual):
        gpt = _gpt(config, settings, topology, virtual, tied=config.tie_word_embeddings and not scalar)
        if scalar and gpt.post_process:
            gpt.output_layer = nn.Linear(config.hidden_size, 1, bias=skeleton.score.bias is not None)
            gpt.output_layer.to(device=device, dtype=head_dtype)
        chunks.append(StageChunk(gpt, skeleton, topology))
    return chunks


def _gpt(config: PreTrainedConfig, settings: Any, topology: Topology, virtual: int, *, tied: bool) -> Any:
    sizes: Sizes = topology.sizes
    first = topology.is_first and virtual == 0
    last = topology.is_last and virtual == sizes.virtual - 1
    stage = virtual if sizes.virtual > 1 else None
    specification = _block(settings, FAMILIES[str(config.model_type)].experts, stage)
    return megatron("models.gpt").GPTModel(
        settings,
        specification,
        vocab_size=padded_vocabulary(config, sizes),
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        # Angles are computed by the rotary module of transformers, with every scaling it knows.
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
        vp_stage=stage,
    )


def _block(settings: Any, experts: bool, virtual: int | None) -> Any:
    """The specification of the layers of one chunk."""
    specs = megatron("models.gpt.gpt_layer_specs")
    block = megatron("transformer.transformer_block")
    layer = specs.get_gpt_layer_local_spec(
        num_experts=settings.num_moe_experts if experts else None,
        qk_layernorm=settings.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = TokenNorm
    parts.pre_mlp_layernorm = TokenNorm
    parts.self_attn_bda = residual_sum
    parts.mlp_bda = residual_sum
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if settings.qk_layernorm:
        attention.q_layernorm = TokenNorm
        attention.k_layernorm = TokenNorm
    count = block.get_num_layers_to_build(settings, virtual)
    return block.TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=TokenNorm)


def _windows(config: PreTrainedConfig) -> list[int | None] | None:
    """The sliding window of each layer, where some have one."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    found: list[int | None] = []
    for kind in kinds:
        found.append(window if kind == "sliding_attention" else None)
    return found
