"""Weights of vision towers, with the projector to the language model. Image tokens are tokens of the prompt:
they are part of data.max_prompt_length."""

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
_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224}
_VISION_DEFAULTS: dict[str, dict[str, int]] = {
    "clip_vision_model": {**_CLIP, "patch_size": 32},
    "siglip_vision_model": {**_CLIP, "patch_size": 16},
    "idefics3": {**_CLIP, "hidden_size": 1152, "patch_size": 32},
}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
}
_TEXT_DEFAULTS: dict[str, dict[str, int]] = {"llama": _LLAMA, "gemma3_text": _GEMMA}
"""Configurations of the hub leave out what is a default of transformers."""


def text_values(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that describes the language model, with the defaults that it leaves out."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    kind = text.get("model_type")
    if kind is None and config.get("model_type") == "gemma3":
        kind = "gemma3_text"
    return {**_TEXT_DEFAULTS.get(str(kind), {}), **text, "model_type": kind}


def tower_weights(config: Mapping[str, object]) -> int:
    """Weights of the vision tower that a config.json describes; 0 for a text model. Refuses a tower that it
    does not know."""
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
    text = cast(VisionJson, text_values(config))
    if kind in ("idefics3", "smolvlm"):
        return _idefics(vision, text["hidden_size"], cast(int, config.get("scale_factor", 2)))
    if kind == "llava":
        return _llava(config, vision, text["hidden_size"])
    if kind == "gemma3":
        tower, width = _siglip(vision)
        return tower + width * text["hidden_size"] + width  # the projector and its norm
    raise ValueError(
        f"The planner does not know the vision tower of model_type={kind!r}. It knows those of qwen2_vl, "
        "qwen2_5_vl, qwen3_vl, qwen3_vl_moe, llava, idefics3, smolvlm and gemma3."
    )


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


# --- CLIP and SigLIP ----------------------------------------------------------------------------------------


def _encoder(vision: VisionJson) -> int:
    """Blocks of attention and MLP with two norms each, and the last norm."""
    width = vision["hidden_size"]
    inner = vision["intermediate_size"]
    block = 4 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    return vision["num_hidden_layers"] * block + 2 * width


def _embeddings(vision: VisionJson, *, bias: bool, more_places: int) -> int:
    """The convolution over patches, and a vector for each place."""
    width = vision["hidden_size"]
    side = vision["patch_size"]
    places = (vision["image_size"] // side) ** 2 + more_places
    return width * vision.get("num_channels", CHANNELS) * side * side + width * bias + places * width


def _with_defaults(vision: Mapping[str, object], kind: str) -> VisionJson:
    return cast(VisionJson, {**_VISION_DEFAULTS[kind], **vision})


def _siglip(values: Mapping[str, object]) -> tuple[int, int]:
    """Weights and width of a SigLIP tower."""
    vision = _with_defaults(values, "siglip_vision_model")
    width = vision["hidden_size"]
    found = _embeddings(vision, bias=True, more_places=0) + _encoder(vision)
    if values.get("vision_use_head", True):  # attention from one vector to all, a norm and an MLP
        inner = vision["intermediate_size"]
        pooling = _linear(width, 3 * width) + _linear(width, width)
        found += width + pooling + 2 * width + _linear(width, inner) + _linear(inner, width)
    return found, width


def _idefics(values: Mapping[str, object], hidden: int, scale: int) -> int:
    vision = _with_defaults(values, "idefics3")
    projector = vision["hidden_size"] * scale**2 * hidden
    return _embeddings(vision, bias=True, more_places=0) + _encoder(vision) + projector


def _llava(config: Mapping[str, object], values: Mapping[str, object], hidden: int) -> int:
    kind = str(values.get("model_type", "clip_vision_model"))
    if kind == "siglip_vision_model":
        tower, width = _siglip(values)
    elif kind == "clip_vision_model":
        vision = _with_defaults(values, kind)
        width = vision["hidden_size"]
        # a vector of the class, with a place of its own, and a norm in front of the blocks
        tower = _embeddings(vision, bias=False, more_places=1) + width + 2 * width + _encoder(vision)
    else:
        raise ValueError(f"The planner does not know the vision tower {kind!r} of a llava model.")
    layers = config.get("vision_feature_layer")
    joined = width * (len(layers) if isinstance(layers, list) else 1)
    bias = bool(config.get("multimodal_projector_bias", True))
    return tower + joined * hidden + hidden * hidden + 2 * hidden * bias
