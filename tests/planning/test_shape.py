"""Parameter counts by arithmetic against the modules that transformers makes."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.planning.adapters import adapter_weights
from strop.planning.shape import FAMILIES, KNOWN, plain_name, read_shape, shape_of

SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 2,
}
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
}


def real_count(kind: str, settings: dict) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    "name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b", "smollm2-135m"]
)
def test_known_models_have_as_many_weights_as_their_modules(name):
    settings = {key: value for key, value in KNOWN[name].items() if key != "model_type"}
    assert shape_of(name).parameters == real_count(KNOWN[name]["model_type"], settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_as_many_weights_as_was_published(name):
    assert shape_of(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_counted_like_its_module(kind):
    for extra in (
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "attention_bias": True, **EXPERTS},
    ):
        config = AutoConfig.for_model(kind, **{**SIZE, **extra}).to_dict()
        assert read_shape(config).parameters == real_count(kind, {**SIZE, **extra}), extra


def test_a_scalar_model_has_one_output_instead_of_a_vocabulary():
    language, scalar = shape_of("qwen2.5-7b"), shape_of("qwen2.5-7b", scalar=True)
    assert language.parameters - scalar.parameters == language.embedding - language.hidden


def test_tokens_meet_the_chosen_experts_only():
    shape = shape_of("qwen3-30b-a3b")
    assert 2.9e9 < shape.multiplied + shape.embedding < 3.4e9


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_are_counted_like_those_of_peft(kind):
    pytest.importorskip("peft")
    from strop.models.lora import add_adapters

    config = AutoConfig.for_model(kind, **{**SIZE, **EXPERTS})
    if kind == "deepseek_v3":
        config.first_k_dense_replace = 1
    with torch.device("meta"):
        model = add_adapters(AutoModelForCausalLM.from_config(config), rank=4, alpha=8)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert adapter_weights(read_shape(config.to_dict()), 4) == trained


def test_names_of_hubs_are_understood():
    assert plain_name("Qwen/Qwen2.5-Math-7B-Instruct") == "qwen2.5-7b"
    assert plain_name("meta-llama/Meta-Llama-3.1-70B-Instruct") == "llama-3-70b"


def test_a_folder_is_read_and_override_config_applies(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZE}))
    assert shape_of(str(tmp_path)).layers == 3
    assert shape_of(str(tmp_path), changes={"num_hidden_layers": 1}).layers == 1


def test_what_is_not_known_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"neither a folder .* Did you mean 'qwen2.5-7b'"):
        shape_of("qwen2.5-7bb")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        shape_of(str(tmp_path))
    with pytest.raises(ValueError, match="does not know model_type='mamba'"):
        read_shape({"model_type": "mamba"})
    with pytest.raises(ValueError, match="lacks vocab_size"):
        read_shape(
            {"model_type": "llama", **{key: value for key, value in SIZE.items() if key != "vocab_size"}}
        )


@pytest.mark.parametrize("value", [None, 0, -48, "48x", [48], 48.5])
@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads"])
def test_a_size_that_is_missing_or_none_is_named(key, value):
    with pytest.raises(ValueError, match=f"config.json.*{key}"):
        read_shape({**SIZE, "model_type": "llama", key: value})


def test_queries_of_latent_attention_may_be_made_of_the_hidden_state():
    """Moonlight has q_lora_rank=null."""
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    config = {**SIZE, **EXPERTS, **sizes, **experts, "head_dim": 4, "num_key_value_heads": 4}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **config))
    shape = read_shape({**config, "model_type": "deepseek_v3"})
    assert shape.parameters == sum(weight.numel() for weight in module.parameters())
