"""Pictures, and prompts with them for vLLM: shared by vision_step.py and rollout_vllm.py. Imports nothing of
Strop."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

WORDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
CELL = 28
"""Pixels of a picture are equal in squares of this side, as in pictures with areas."""


def picture(number: int, side: int) -> Image:
    """A picture of coloured squares; each number has another one."""
    import numpy as np
    from PIL import Image

    cells = -(-side // CELL)
    colours = np.random.default_rng(number).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    large = colours.repeat(CELL, 0).repeat(CELL, 1)[:side, :side]
    return Image.fromarray(large)


def image_settings(vision: dict[str, Any], side: int) -> dict[str, Any]:
    """preprocessor_config.json, under which a picture keeps its size."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "min_pixels": side * side,
        "max_pixels": side * side,
    }


def write_folder(folder: Path, config: Any, settings: dict[str, Any], tokens: dict[str, int]) -> None:
    """A model folder without weights: configuration, a tokenizer that knows the tokens of images, and the
    settings of the processor."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    names = {number: WORDS[name] for name, number in tokens.items()}
    vocabulary = {names.get(i, f"t{i}"): i for i in range(config.get_text_config().vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS.values()])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1", pad_token="t2")
    made.save_pretrained(folder)


def prompts_with_pictures(prompts: list[list[int]], side: int) -> list[dict[str, Any]]:
    """Prompt i with picture i, as vLLM takes them."""
    return [
        {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(number, side)}}
        for number, ids in enumerate(prompts)
    ]


STAND_IN = {
    "__init__.py": "__version__ = '0.0.0'\n",
    "io.py": "ImageReadMode = decode_image = None\n",
    "transforms/__init__.py": "from torchvision.transforms.modes import InterpolationMode\n",
    "transforms/modes.py": (
        "import enum\nInterpolationMode = enum.Enum('InterpolationMode', "
        "'NEAREST NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS')\n"
    ),
    "transforms/functional.py": "pil_to_tensor = None\n",
    "transforms/v2/__init__.py": "",
    "transforms/v2/functional.py": "",
}
"""What transformers imports of torchvision. Nothing of it is called: pictures are prepared with PIL."""


def stand_in_for_torchvision(folder: str) -> bool:
    """vLLM imports a file of transformers that imports torchvision. Without torchvision, a stand-in in
    `folder` is imported, in this process and in those that vLLM starts. Returns whether that is so."""
    if importlib.util.find_spec("torchvision") is not None:
        return False
    for name, text in STAND_IN.items():
        file = Path(folder) / "torchvision" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sys.path.insert(0, folder)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = folder if others is None else f"{folder}{os.pathsep}{others}"
    return True


def load_processor_without_videos() -> None:
    """transformers loads the processor of Qwen2.5-VL only with its video processor, which needs torchvision.
    Afterwards it is loaded for images alone, which PIL prepares."""
    import transformers
    from transformers.processing_utils import VideosKwargs

    class NoVideos:
        valid_kwargs = VideosKwargs
        merge_size = 2

    kind = transformers.Qwen2_5_VLProcessor
    checked = kind.check_argument_for_proper_class

    def check(self: Any, name: str, argument: object) -> object:
        return None if isinstance(argument, NoVideos) else checked(self, name, argument)

    def load(cls: Any, folder: str, *_: object, **__: object) -> Any:
        settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
        for name in ("image_processor_type", "processor_class"):
            settings.pop(name)
        images = transformers.Qwen2VLImageProcessorPil(**settings)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return cls(image_processor=images, tokenizer=tokenizer, video_processor=NoVideos())

    kind.check_argument_for_proper_class = check
    kind.from_pretrained = classmethod(load)
