"""Pictures of coloured shapes, and a tiny Qwen2.5-VL with random weights that is to name them."""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from strop.data.make import write
from strop.quickstart.tiny_model import tiny_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 50)}
SHAPES = ("square", "ring", "cross")
SIDE = 24
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 6,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": SIDE * SIDE,
    "max_pixels": SIDE * SIDE,
}


def draw(colour: str, shape: str, chance: random.Random) -> bytes:
    """A PNG of one shape: place, size, shade and background vary."""
    grey = chance.randrange(180, 256)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    pen = ImageDraw.Draw(image)
    size = chance.randrange(15, 20)
    left = chance.randrange(SIDE - size)
    top = chance.randrange(SIDE - size)
    tint = tuple(max(0, min(255, value + chance.randrange(-25, 26))) for value in COLOURS[colour])
    box = (left, top, left + size, top + size)
    if shape == "ring":
        pen.ellipse(box, outline=tint, width=3)
    elif shape == "square":
        pen.rectangle(box, fill=tint)
    else:
        third = size // 3
        pen.rectangle((left + third, top, left + size - third, top + size), fill=tint)
        pen.rectangle((left, top + third, left + size, top + size - third), fill=tint)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Rows of pictures with their names; all names are equally frequent."""
    chance = random.Random(seed)
    names = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    made: list[dict[str, object]] = []
    for index in range(count):
        colour, shape = names[index % len(names)]
        made.append(
            {
                "data_source": "shapes",
                "prompt": [{"role": "user", "content": "<image>what"}],
                "response": f"{colour}{shape}",
                "images": [{"bytes": draw(colour, shape, chance)}],
                "reward_model": {"style": "rule", "ground_truth": f"{colour}{shape}"},
            }
        )
    chance.shuffle(made)
    return made


def with_other_pictures(made: list[dict[str, object]], seed: int) -> list[dict[str, object]]:
    """The same questions and answers, each with a picture of another row."""
    order = list(range(len(made)))
    random.Random(seed).shuffle(order)
    return [{**row, "images": made[other]["images"]} for row, other in zip(made, order, strict=True)]


def tiny_vlm(folder: Path, seed: int) -> None:
    """A model of about 150,000 weights, with tokenizer and processor."""
    tokenizer = tiny_tokenizer([*SPECIAL, "what", *COLOURS, *SHAPES], template=TEMPLATE)
    image_id, video_id = tokenizer.convert_tokens_to_ids([SPECIAL[1], SPECIAL[3]])
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 6,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 24,
        "fullatt_block_indexes": [0, 1],
        "initializer_range": 0.06,
    }
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image_id,
        video_token_id=video_id,
        tie_word_embeddings=True,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))


def prepare(out: Path, *, seed: int = 1, train: int = 1200, held_out: int = 240) -> None:
    write(rows(train, seed), out / "data" / "train.parquet")
    tested = rows(held_out, seed + 1)
    write(tested, out / "data" / "test.parquet")
    write(with_other_pictures(tested, seed), out / "data" / "shuffled.parquet")
    tiny_vlm(out / "model", seed)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """1 for the right names of the colour and of the shape."""
    return float(solution_str.removesuffix("<eos>") == ground_truth)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/shapes_vlm"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    prepare(asked.out, seed=asked.seed)
