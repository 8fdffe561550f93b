"""Checkpoints of megatron-core itself, written by ranks in the layout of verl; started by test_megatron_saved.py."""

from __future__ import annotations

import os
import queue
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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
FAMILIES = ("qwen2", "qwen3_moe")


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


def settings_of(config, sizes: Sizes):
    """The TransformerConfig of a tiny model, without any part of ours."""
    experts = {}
    if config.model_type == "qwen3_moe":
        experts = {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_token_dispatcher_type": "allgather",
        }
    return megatron("transformer").TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3_moe",
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        pipeline_dtype=torch.float32,
        sequence_parallel=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **experts,
    )


def build(model, sizes: Sizes):
    """megatron-core's own GPTModel with the weights of a Hugging Face model."""
    topology = join(sizes, here(), torch.device("cpu"))
    config = model.config
    specs = megatron("models.gpt.gpt_layer_specs")
    gpt = megatron("models.gpt").GPTModel(
        settings_of(config, sizes),
        specs.get_gpt_layer_local_spec(
            num_experts=getattr(config, "num_experts", None),
            qk_layernorm=config.model_type == "qwen3_moe",
            normalization="RMSNorm",
        ),
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
