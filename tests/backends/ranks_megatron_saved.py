"""Checkpoints of megatron-core itself, written by ranks in the layout of verl; started by test_merge_megatron.py."""

from __future__ import annotations

import os
import queue
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.backends.fsdp.experts import expert_count
from strop.backends.megatron.backend import MegatronBackend
from strop.backends.megatron.library import megatron
from strop.backends.megatron.load import checkpoint_loader
from strop.backends.megatron.topology import Sizes, join
from strop.config.schema.megatron import MegatronConfig
from strop.shared.build import open_megatron
from tests.backends.megatron_cpu import without_cuda
from tests.backends.megatron_saved import PADDED, head_size, whole_of
from tests.backends.ranks import here
from tests.models.tiny import tiny_model

DIVIDED = {1: Sizes(), 2: Sizes(tensor=2), 4: Sizes(tensor=2, pipeline=2)}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
HEAD_NORMS = ("qwen3", "qwen3_moe")


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


def settings_of(config, sizes: Sizes):
    """The TransformerConfig of a tiny model, without any part of ours."""
    kind, more = "TransformerConfig", {}
    if expert_count(config):
        more = {
            "num_moe_experts": expert_count(config),
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "moe_router_topk": config.num_experts_per_tok,
            "moe_token_dispatcher_type": "allgather",
        }
    if config.model_type == "deepseek_v3":
        kind = "MLATransformerConfig"
        dense = config.first_k_dense_replace
        more |= {
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "rope_type": "rope",
            "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }
    return getattr(megatron("transformer"), kind)(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type in (*HEAD_NORMS, "deepseek_v3"),
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        pipeline_dtype=torch.float32,
        sequence_parallel=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def layers_of(settings, config):
    """megatron-core's own specification of the layers."""
    specs = megatron("models.gpt.gpt_layer_specs")
    if config.model_type == "deepseek_v3":
        # 0.16.1 sets it although the library is missing.
        megatron("transformer.multi_latent_attention").HAVE_TE = False
        block = specs.get_gpt_decoder_block_spec(
            settings, use_transformer_engine=False, normalization="RMSNorm"
        )
        for layer in block.layer_specs:
            # Has no weights; that of megatron-core cannot be built here without Transformer Engine.
            layer.submodules.self_attention.submodules.core_attention = megatron(
                "transformer.identity_op"
            ).IdentityOp
        return block
    return specs.get_gpt_layer_local_spec(
        num_experts=expert_count(config) or None,
        qk_layernorm=config.model_type in HEAD_NORMS,
        normalization="RMSNorm",
    )


def build(model, sizes: Sizes):
    """megatron-core's own GPTModel with the weights of a Hugging Face model."""
    topology = join(sizes, here(), torch.device("cpu"))
    config = model.config
    settings = settings_of(config, sizes)
    gpt = megatron("models.gpt").GPTModel(
        settings,
        layers_of(settings, config),
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=topology.is_first,
        post_process=topology.is_last,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
    )
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    own = dict(gpt.named_parameters())
    first = min((layer.layer_number for layer in gpt.decoder.layers), default=1) - 1
    for name, parameter in own.items():
        whole = whole_of(name, weights, first, config)
        parameter.data.copy_(share_of(whole, parameter, topology, gated="linear_fc1" in name))
    for layer in gpt.decoder.layers:
        if config.model_type == "deepseek_v3" and hasattr(layer.mlp, "router"):
            gate = model.model.layers[layer.layer_number - 1].mlp.gate
            layer.mlp.router.expert_bias.copy_(gate.e_score_correction_bias)
    return gpt


def share_of(whole: Tensor, parameter: Tensor, topology, *, gated: bool) -> Tensor:
    """The rows or columns of a tensor-parallel rank; gate and up are divided each."""
    if whole.shape == parameter.shape:
        return whole
    size, rank = topology.sizes.tensor, topology.tensor_rank
    halves = whole.chunk(2) if gated else (whole,)
    return torch.cat([half.chunk(size, parameter.partition_dim)[rank] for half in halves])


@pytest.mark.parametrize("family", FAMILIES)
def test_write(family):
    """Below the folder SAVED, as a checkpoint manager of verl would."""
    folder = Path(os.environ["SAVED"]) / family / "actor"
    model = tiny_model(family)
    gpt = build(model, DIVIDED[here().world])
    if here().is_rank0:
        (folder / "dist_ckpt").mkdir(parents=True)
        model.config.save_pretrained(folder / "huggingface")
        model.save_pretrained(folder.parent / "source")
    here().all_gather_object(None)
    # Results of the write come from this process: no process of a manager is needed.
    megatron("dist_checkpointing.strategies.filesystem_async")._results_queue = queue.Queue()
    megatron("dist_checkpointing").save(gpt.sharded_state_dict(), str(folder / "dist_ckpt"))
    here().all_gather_object(None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backend_starts_from_it(family):
    """Weights of dist_checkpointing_path, divided over the ranks; every bit is that of the source."""
    folder = Path(os.environ["SAVED"]) / family / "actor"
    source = tiny_model(family)
    sizes = DIVIDED[here().world]
    settings = MegatronConfig(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        use_dist_checkpointing=True,
        dist_checkpointing_path=str(folder),
    )
    other = tiny_model(family, seed=1)
    backend = MegatronBackend(
        other,
        ranks=here(),
        megatron=settings,
        load_weights=checkpoint_loader(partial(open_megatron, other, settings), here()),
    )
    expected = dict(source.named_parameters())
    found = dict(backend.export_weights())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
