"""Weights of the vision towers of the Qwen families. Image tokens are tokens of the prompt: they are part of
data.max_prompt_length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

VisionJson = Mapping[str, int]
"""The vision_config of a config.json."""
LANGUAGE_PARTS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), "qwen3"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), "qwen3_moe"),
}
"""Model types whose language model has the weights of another one."""
CHANNELS = 3


def tower_weights(config: Mapping[str, object]) -> int:
    """Weights of the vision tower that a config.json describes; 0 for a text model and for families whose
    tower is not known."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0
    kind = str(config.get("model_type"))
    if kind == "qwen2_5_vl":
        return _qwen2_5(cast(VisionJson, vision))
    if kind == "qwen2_vl":
        return _qwen2(cast(VisionJson, vision))
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        return _qwen3(cast("Mapping[str, object]", vision))
    return 0


def _linear(inputs: int, outputs: int) -> int:
    """A linear layer with a bias."""
    return inputs * outputs + outputs


def _patches(vision: VisionJson, width: int) -> int:
    """The convolution over patches, without a bias."""
    side = vision["patch_size"]
    return width * vision.get("in_channels", CHANNELS) * vision["temporal_patch_size"] * side * side


def _attention(width: int) -> int:
    return _linear(width, 3 * width) + _linear(width, width)


def _merger(vision: VisionJson, width: int, outputs: int) -> int:
    """The two layers that make one token of several patches, without their norm."""
    joined = width * vision["spatial_merge_size"] ** 2
    return _linear(joined, joined) + _linear(joined, outputs)


def _qwen2_5(vision: VisionJson) -> int:
    width = vision["hidden_size"]
    inner = vision["intermediate_size"]
    mlp = 2 * _linear(width, inner) + _linear(inner, width)
    block = 2 * width + _attention(width) + mlp
    merger = width + _merger(vision, width, vision["out_hidden_size"])
    return _patches(vision, width) + vision["depth"] * block + merger


def _qwen2(vision: VisionJson) -> int:
    width = vision["embed_dim"]
    inner = int(width * vision["mlp_ratio"])
    block = 4 * width + _attention(width) + _linear(width, inner) + _linear(inner, width)
    merger = 2 * width + _merger(vision, width, vision["hidden_size"])
    return _patches(vision, width) + vision["depth"] * block + merger


def _qwen3(values: Mapping[str, object]) -> int:
    vision = cast(VisionJson, values)
    width = vision["hidden_size"]
    inner = vision["intermediate_size"]
    block = 4 * width + _attention(width) + _linear(width, inner) + _linear(inner, width)
    merger = _merger(vision, width, vision["out_hidden_size"])
    deep = len(cast("list[int]", values["deepstack_visual_indexes"]))
    joined = width * vision["spatial_merge_size"] ** 2
    mergers = 2 * width + merger + deep * (2 * joined + merger)
    places = vision["num_position_embeddings"] * width
    return _patches(vision, width) + width + places + vision["depth"] * block + mergers
