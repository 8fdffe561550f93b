"""Tiny random models that take images, with tokenizer and processor files, one per family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from strop.models.vision.processor import build_processor
from strop.quickstart.tiny_model import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}BEGINIMAGEEND"
    "{% elif p['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "head_dim": 8,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_WORDS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 512,
}
QWEN_VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
IDEFICS = {
    "words": ["<image>", "<fake_token_around_image>", "<global-img>"],
    "begin": "<image>",
    "images": {"image_processor_type": "Idefics3ImageProcessor"},
    "text": {**TEXT, "model_type": "llama"},
    "vision": {**SIGLIP, "patch_size": 4},
    "config": lambda tokenizer: {
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
    },
}
"""Their processors need torchvision before transformers 5.18: images are made by hand, as crops of 4 tokens."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "words": QWEN_WORDS,
        "begin": "<|vision_start|><|image_pad|><|vision_end|>",
        "images": QWEN_IMAGES,
        "text": {**TEXT, "rope_parameters": MROPE},
        "vision": {**QWEN_VISION, "depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "words": QWEN_WORDS,
        "begin": "<|vision_start|><|image_pad|><|vision_end|>",
        "images": QWEN_IMAGES,
        "text": {**TEXT, "rope_parameters": MROPE},
        "vision": {
            **QWEN_VISION,
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
    },
    "qwen3_vl": {
        "words": QWEN_WORDS,
        "begin": "<|vision_start|><|image_pad|><|vision_end|>",
        "images": QWEN_IMAGES,
        "text": {**TEXT, "rope_parameters": MROPE},
        "vision": {
            **QWEN_VISION,
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "llava": {
        "words": ["<image>"],
        "begin": "<image>",
        "images": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        "processor": {
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "text": {**TEXT, "model_type": "llama"},
        "vision": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16},
        "config": lambda tokenizer: {
            "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
            "vision_feature_layer": -1,
        },
    },
    **dict.fromkeys(("idefics3", "smolvlm"), IDEFICS),
    "gemma3": {
        "words": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        "begin": "<start_of_image>",
        "special": {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
            "boi_token_id": 3,
            "image_token_id": 4,
            "eoi_token_id": 5,
        },
        "images": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        "processor": {"image_seq_length": 4},
        "text": {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision": {**SIGLIP, "model_type": "siglip_vision_model", "patch_size": 4, "vision_use_head": False},
        "config": lambda tokenizer: {
            "image_token_index": tokenizer.convert_tokens_to_ids("<image_soft_token>"),
            "boi_token_index": tokenizer.convert_tokens_to_ids("<start_of_image>"),
            "eoi_token_index": tokenizer.convert_tokens_to_ids("<end_of_image>"),
            "mm_tokens_per_image": 4,
        },
    },
}


def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    facts = FAMILIES[family]
    template = TEMPLATE.replace("BEGINIMAGEEND", facts["begin"])
    tokenizer = tiny_tokenizer([*facts["words"], "what", "red", "blue", "colour", " "], template=template)
    for name, word in facts.get("special", {}).items():
        setattr(tokenizer, name, word)
    return tokenizer


def config_of(family: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    facts = FAMILIES[family]
    text = {
        **facts["text"],
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids = {}
    for name, word in (("image", "<|image_pad|>"), ("video", "<|video_pad|>")):
        if word in facts["words"]:
            ids[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(word)
    more = facts.get("config", lambda _: {})(tokenizer)
    return AutoConfig.for_model(
        family, text_config=text, vision_config=facts["vision"], tie_word_embeddings=False, **ids, **more
    )


def tiny_vlm(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model in evaluation mode."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = config_of(family, tokenizer_of(family))
    model = AutoModelForImageTextToText.from_config(config)
    # With small weights tokens hardly change each other's log-probs.
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                scale = (1.0 / weight[0].numel()) ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale * 1.5)
    return model.eval()


def processor_of(family: str) -> Any:
    facts = FAMILIES[family]
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return build_processor(
        PROCESSOR_MAPPING_NAMES[family], tokenizer_of(family), facts["images"], facts.get("processor", {})
    )


def save_vlm(family: str, folder: Path, seed: int = 0) -> Path:
    """A model folder as the hub has them."""
    tiny_vlm(family, seed).save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    facts = FAMILIES[family]
    words = {name: word for name, word in facts.get("special", {}).items() if isinstance(word, str)}
    if words:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "extra_special_tokens": words}))
    (folder / "preprocessor_config.json").write_text(json.dumps(facts["images"]))
    if "processor" in facts:
        (folder / "processor_config.json").write_text(json.dumps(facts["processor"]))
    return folder


def picture(colour: tuple[int, int, int] = (255, 0, 0), width: int = 16, height: int = 16) -> Image.Image:
    """A picture with a gradient, so that places differ."""
    image = Image.new("RGB", (width, height), colour)
    for x in range(width):
        for y in range(height):
            image.putpixel((x, y), (colour[0], (colour[1] + 9 * x) % 256, (colour[2] + 5 * y) % 256))
    return image


def set_window(model: Any, window: int) -> None:
    """Another size of the windows of layers that have one."""
    model.config.text_config.sliding_window = window
    for part in model.modules():
        if getattr(part, "is_sliding", False):
            part.sliding_window = window
