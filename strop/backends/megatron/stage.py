"""The layers of one pipeline stage: megatron-core's GPTModel with the parts of layers.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.backends.megatron.latent import LatentAttention, latent_shape
from strop.backends.megatron.layers import (
    GatedMlp,
    GroupedExperts,
    PackedCoreAttention,
    PackedRow,
    SharedExpert,
    TokenRMSNorm,
    home_of,
    plain_self_attention,
    residual_sum,
)
from strop.backends.megatron.library import megatron
from strop.backends.megatron.replay import ChunkExperts
from strop.backends.megatron.shape import padded_vocabulary, transformer_config
from strop.backends.megatron.topology import Sizes, Topology
from strop.config.megatron import FAMILIES
from strop.models.lora import without_adapter
from strop.models.packing import Inputs
from strop.models.patches import patch_for_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class StageChunk:
    """Consecutive layers of the model, with the embedding or the output head where they belong."""

    def __init__(self, gpt: Any, skeleton: Any, topology: Topology):
        self.gpt = gpt
        self.rotary: nn.Module = skeleton.model.rotary_emb
        self.home = home_of(skeleton)
        self.padding: int | None = skeleton.get_input_embeddings().padding_idx
        """The token whose embedding gets no gradient."""
        self.vocabulary = int(skeleton.config.vocab_size)
        self.tied = bool(skeleton.config.tie_word_embeddings)
        self.experts = ChunkExperts(gpt, skeleton.config, topology)
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
            if torch.is_grad_enabled() and not hidden.requires_grad:
                # Frozen embeddings (LoRA): layers that are computed again pass gradients on only if their
                # input has one, and so do stages without adapters.
                hidden.requires_grad_()
        cos, sin = self._angles(inputs.positions)
        states: Tensor = self.gpt.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=PackedRow(inputs.packing, tokens, cos, sin, self.home),
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

    @torch.no_grad()
    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, N, D] at these positions, with every scaling that transformers knows."""
        narrow = torch.empty(0, dtype=self.gpt.config.params_dtype, device=positions.device)
        cos, sin = self.rotary(narrow, positions)
        return cos, sin

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
    if FAMILIES[str(config.model_type)].latent:
        settings.strop_latent = latent_shape(config, skeleton.model.layers[0].self_attn)
    skeleton.model.rotary_emb.to(device)
    patch_for_device(skeleton, device, dtype, sizes.context, only=("rotary", "flash_attention"))
    chunks = []
    for virtual in range(sizes.virtual):
        gpt = _gpt(config, settings, topology, virtual, tied=config.tie_word_embeddings and not scalar)
        gpt.to(device)  # megatron-core makes routers on the CPU and moves them in their first pass
        if scalar and gpt.post_process:
            # Random numbers are drawn only for weights that are used, as on one device.
            with torch.device("meta"):
                head = nn.Linear(config.hidden_size, 1, bias=skeleton.score.bias is not None)
            gpt.output_layer = head.to(dtype=head_dtype).to_empty(device=device)
        patch_for_device(gpt, device, dtype, only=("rms_norm",))
        use_routing_biases(gpt, skeleton, device)
        chunks.append(StageChunk(gpt, skeleton, topology))
    return chunks


def _gpt(config: PreTrainedConfig, settings: Any, topology: Topology, virtual: int, *, tied: bool) -> Any:
    sizes: Sizes = topology.sizes
    first = topology.is_first and virtual == 0
    last = topology.is_last and virtual == sizes.virtual - 1
    stage = virtual if sizes.virtual > 1 else None
    specification = _block(config, settings, stage)
    return megatron("models.gpt").GPTModel(
        settings,
        specification,
        vocab_size=padded_vocabulary(config, sizes),
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        # Our attention rotates, as the rotary module of transformers says.
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
        vp_stage=stage,
    )


def use_routing_biases(gpt: Any, skeleton: Any, device: torch.device) -> None:
    """Routers choose experts with the biases of the Hugging Face module, where it has some. They are buffers:
    both modules have the same tensor."""
    for layer in gpt.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is None or router.expert_bias is None:
            continue
        gate = without_adapter(skeleton.model.layers[layer.layer_number - 1].mlp.gate)
        gate.e_score_correction_bias = gate.e_score_correction_bias.to(device, torch.float32)
        router.expert_bias = gate.e_score_correction_bias


def _block(config: PreTrainedConfig, settings: Any, virtual: int | None) -> Any:
    """The specification of the layers of one chunk."""
    family = FAMILIES[str(config.model_type)]
    block = megatron("transformer.transformer_block")
    first = megatron("transformer.transformer_layer").get_transformer_layer_offset(settings, virtual)
    layers = []
    for number in range(first, first + block.get_num_layers_to_build(settings, virtual)):
        experts = family.experts and number >= (getattr(config, "first_k_dense_replace", None) or 0)
        layers.append(_layer(settings, experts=experts, latent=family.latent))
    return block.TransformerBlockSubmodules(layer_specs=layers, layer_norm=TokenRMSNorm)


def _layer(settings: Any, *, experts: bool, latent: bool) -> Any:
    specs = megatron("models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(
        num_experts=settings.num_moe_experts if experts else None,
        qk_layernorm=settings.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = TokenRMSNorm
    parts.pre_mlp_layernorm = TokenRMSNorm
    parts.self_attn_bda = residual_sum
    parts.mlp_bda = residual_sum
    if experts:
        parts.mlp.submodules.experts = GroupedExperts
        parts.mlp.submodules.shared_experts = SharedExpert
    else:
        parts.mlp = GatedMlp
    if latent:
        parts.self_attention = LatentAttention
        return layer
    parts.self_attention.module = plain_self_attention()
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if settings.qk_layernorm:
        attention.q_layernorm = TokenRMSNorm
        attention.k_layernorm = TokenRMSNorm
    return layer


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
