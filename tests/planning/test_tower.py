"""Weights of vision towers against real modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from strop.planning.shape import read_shape
from tests.models.vision.tiny_vlm import FAMILIES, tiny_vlm

CLIP_LARGE = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
}
SIGLIP = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "vision_config": CLIP_LARGE,
        "vision_feature_layer": -2,
    },
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": SIGLIP,
    },
    "SmolVLM-256M": {
        "model_type": "smolvlm",
        "scale_factor": 4,
        "text_config": {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "vocab_size": 49280,
        },
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "patch_size": 16,
        },
    },
}
"""What the configurations of published models say; what they leave out is a default of transformers."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_counted(family: str) -> None:
    model = tiny_vlm(family)
    shape = read_shape(model.config.to_dict())
    language = {id(weight) for weight in model.model.get_decoder().parameters()}
    head = {id(weight) for weight in model.lm_head.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in language | head]
    assert shape.tower == sum(weight.numel() for weight in rest)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_leave_out_defaults(name: str) -> None:
    said = PUBLISHED[name]
    config = AutoConfig.for_model(**said)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert read_shape(said).parameters == sum(weight.numel() for weight in model.parameters())


def test_an_unknown_tower_is_named() -> None:
    other = {**PUBLISHED["llava-1.5-7b"], "model_type": "new_vl"}
    with pytest.raises(ValueError, match="vision tower of model_type='new_vl'"):
        read_shape(other)
