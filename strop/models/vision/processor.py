"""The processor of a model that takes images, without torchvision: images are prepared by PIL and numpy, so
that every machine computes the same pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config.schema.model import ModelConfig
from strop.extras import require
from strop.models.load import PROCESSOR_FILES, load_config, load_tokenizer, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.processing_utils import ProcessorMixin

IMAGES, OWN, VIDEOS = PROCESSOR_FILES
_OWN_KEYS = ("image_processor", "video_processor", "feature_extractor", "processor_class", "auto_map")
"""Keys of processor_config.json that are not arguments of the processor."""
_VIDEO_FAMILIES = {
    "Qwen2VLProcessor": (28, False),
    "Qwen2_5_VLProcessor": (28, False),
    "Qwen3VLProcessor": (32, True),
}
"""Families whose videos are prepared: pixels of the side of a token, and whether limits are those of all
frames together."""
_OTHER_MASKS = ("paligemma", "gemma3n", "gemma4")
"""Refused before their weights are loaded; models/vision/passes.py refuses others when it sees them."""
_SMALLEST = 128
_LARGEST = 768
"""Tokens of a frame where no file says its pixels."""


def processor_loader(settings: ModelConfig) -> Callable[[], ProcessorMixin]:
    """Loads the processor of the model that `settings` name, when it is called."""
    return partial(
        load_processor,
        settings.tokenizer_path or settings.path,
        settings.path,
        settings.trust_remote_code,
        settings.custom_chat_template,
    )


def load_processor(
    tokenizer_path: str | None,
    path: str | None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> ProcessorMixin:
    """The processor of a model folder; ValueError if the model takes no images."""
    source = resolve(path)
    config = load_config(source, trust_remote_code=trust_remote_code)
    if getattr(config, "vision_config", None) is None:
        raise ValueError(
            f"The data has images, and model.path={path} is a text model ({config.model_type}). Take a model "
            "with a vision tower, or remove the column with images."
        )
    if config.model_type in _OTHER_MASKS:
        raise ValueError(
            f"model.path={path} is of the type {config.model_type}, whose image tokens attend to others by a "
            "rule that training and sampling do not know. Of this family gemma3 is known."
        )
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    tokenizer = load_tokenizer(
        tokenizer_path, trust_remote_code=trust_remote_code, chat_template=chat_template
    )
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        known = ", ".join(sorted({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "llava"}))
        raise ValueError(
            f"Images are not prepared for models of the type {config.model_type} (known: {known})."
        )
    own, images, videos = _settings(Path(source.name))
    return build_processor(name, tokenizer, images, own, videos)


def _settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arguments of the processor, those of its image processor with image_processor_type, and those of its
    video processor."""
    found: list[dict[str, Any]] = []
    for name in (OWN, IMAGES, VIDEOS):
        file = folder / name
        content: dict[str, Any] = {}
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{file} is damaged: {error}. Fetch it again.") from error
        found.append(content)
    own, images, videos = found
    nested = own.get("image_processor")
    if isinstance(nested, dict) and not images:
        images = nested
    if not videos:  # folders without such a file mean one size for both
        videos = own.get("video_processor") or images
    if not images:
        raise ValueError(
            f"{str(folder)!r} has no {IMAGES}, which says how images are prepared. Copy it there from the "
            "folder that the model came from."
        )
    return {name: value for name, value in own.items() if name not in _OWN_KEYS}, images, videos


def build_processor(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    images: dict[str, Any],
    own: dict[str, Any],
    videos: dict[str, Any] | None = None,
) -> ProcessorMixin:
    """The processor class `name` over an image processor with the settings `images`. `videos` are those of
    videos; None: those of images."""
    import transformers

    require("PIL.Image", extra="vision", why="Images in prompts")
    settings = dict(images)
    kind = str(settings.pop("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    for unused in ("processor_class", "feature_extractor_type", "auto_map"):
        settings.pop(unused, None)
    image_processor = getattr(transformers, f"{kind}Pil", None)
    if image_processor is None:
        raise ValueError(
            f"{IMAGES} asks for {kind or 'no image_processor_type'}, which has no version for PIL."
        )
    processor = _without_video(getattr(transformers, name), images if videos is None else videos)
    arguments: dict[str, Any] = dict(own)
    if "video_processor" in processor.get_attributes():
        arguments["video_processor"] = None
    try:
        images_of_pil = image_processor(**settings)
    except ImportError as error:
        raise ValueError(
            f"{kind} of transformers needs torchvision, also for PIL images. Install torchvision."
        ) from error
    try:
        made: ProcessorMixin = processor(image_processor=images_of_pil, tokenizer=tokenizer, **arguments)
    except AttributeError as error:
        raise ValueError(
            f"{name} does not get what it needs from its tokenizer: {error}. The tokenizer files must be "
            "those of the model."
        ) from error
    return made


def _without_video(kind: type[ProcessorMixin], videos: dict[str, Any]) -> type[ProcessorMixin]:
    """The class, whose video processor may be None: that of transformers needs torchvision. It knows the
    limits under which data/videos.py prepares videos: `video_pixels`, the least and the most pixels, of a
    frame or of all frames together (`counts_all_frames`)."""

    def check(self: ProcessorMixin, name: str, argument: object) -> object:
        if argument is None:
            return None
        return kind.check_argument_for_proper_class(self, name, argument)

    members: dict[str, object] = {"check_argument_for_proper_class": check}
    if kind.__name__ in _VIDEO_FAMILIES:
        side, members["counts_all_frames"] = _VIDEO_FAMILIES[kind.__name__]
        size = videos.get("size") or {}
        members["video_pixels"] = (
            videos.get("min_pixels") or size.get("shortest_edge") or _SMALLEST * side * side,
            videos.get("max_pixels") or size.get("longest_edge") or _LARGEST * side * side,
        )
    return type(kind.__name__, (kind,), members)
