from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.layouts.small_model import build_small, config_key, part_classes, small_config

FAMILIES = ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_next", "jamba", "falcon_h1"]


def parts(family: str, **options: bool) -> tuple[Any, Any]:
    """The classes of modules of a model in its usual size, and a small model of it."""
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    small = build_small(type(model), small_config(config, **options))
    return part_classes(model), small


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_has_all_parts_of_a_large_one(family: str) -> None:
    wanted, small = parts(family)
    assert wanted <= part_classes(small)
    assert sum(weight.numel() for weight in small.parameters()) < 2**17


def test_parts_that_a_few_layers_do_not_have_are_found_with_all_layers() -> None:
    """Zamba has an attention block in every sixth layer, and says so in a property."""
    wanted, small = parts("zamba", all_layers=True)
    assert wanted <= part_classes(small)


def test_windows_are_shorter_than_the_sequences_that_are_measured() -> None:
    config: Any = small_config(AutoConfig.for_model("gemma3_text"))
    assert config.sliding_window < 9 and set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_the_given_configuration_stays_as_it_is() -> None:
    config = AutoConfig.for_model("gemma3")
    before = config.to_json_string()
    small_config(config)
    assert config.to_json_string() == before


def test_the_key_depends_on_structure_alone() -> None:
    llama = AutoConfig.for_model("llama", num_hidden_layers=32, hidden_size=4096)
    wider = AutoConfig.for_model("llama", num_hidden_layers=80, hidden_size=8192)
    biased = AutoConfig.for_model("llama", attention_bias=True)
    assert config_key(llama) == config_key(wider) != config_key(biased)


def test_a_vocabulary_may_be_smaller_than_that_of_a_small_model() -> None:
    config: Any = small_config(AutoConfig.for_model("llama", vocab_size=17, max_position_embeddings=8))
    assert config.vocab_size == 61 and config.max_position_embeddings == 128
