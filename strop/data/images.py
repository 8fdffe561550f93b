"""Images and videos of rows, prepared with the processor of the model: it resizes and normalises an image,
and says which text stands for it in the prompt. It is loaded when the first image is prepared, so runs
without images do not import it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config.schema.data import DataConfig
from strop.config.schema.supervised import SupervisedDataConfig
from strop.data.image_files import UnusableImages, read_image
from strop.data.videos import VideoSettings, cut_into_patches, read_frames, video_text
from strop.types import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

LoadProcessor = Callable[[], Any]
"""Loads the processor of transformers for a model; ValueError if the model takes no images. It can be
pickled."""
_UNUSED = ("rows", "cols", "num_crops")
"""What image processors return for their own text, and no model takes."""


@dataclass(frozen=True)
class PreparedImage:
    """An image for the model, and the text that stands for it."""

    inputs: ImageInput
    text: str
    """Replaces the placeholder that the chat template writes."""


@dataclass
class ImageProcessor:
    """Prepares images with the processor of a model."""

    load: LoadProcessor
    min_pixels: int | None = None
    """Smaller images are enlarged. None: as the processor does."""
    max_pixels: int | None = None
    """Larger images are reduced. None: as the processor does."""
    videos: VideoSettings = VideoSettings(DataConfig.video_fps, DataConfig.video_max_frames)
    _loaded: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, load: LoadProcessor, config: DataConfig | SupervisedDataConfig) -> ImageProcessor:
        """The processor under the settings of a data section."""
        videos = VideoSettings(config.video_fps, config.video_max_frames)
        return cls(load, config.min_pixels, config.max_pixels, videos)

    @property
    def processor(self) -> Any:
        if self._loaded is None:
            self._loaded = self.load()
        return self._loaded

    @property
    def placeholder(self) -> str:
        """What the chat template writes for an image."""
        return str(self.processor.image_token)

    @property
    def token_id(self) -> int:
        """The token that stands for one vector of features."""
        tokenizer = self.processor.tokenizer
        found = getattr(tokenizer, "image_token_id", None)
        if found is None:
            found = self.processor.image_token_id
        return int(found)

    @property
    def placeholders(self) -> re.Pattern[str]:
        """Finds what the chat template writes for images and videos; the group `video` is set for a
        video."""
        image = re.escape(self.placeholder)
        if not self._takes_videos:
            return re.compile(f"(?P<image>{image})")
        processor = self.processor
        video = re.escape(str(processor.video_token))
        if processor.counts_all_frames:  # each pair of frames gets such marks, in place of those of the video
            start, end = (re.escape(processor.vision_start_token), re.escape(processor.vision_end_token))
            video = f"{start}{video}{end}|{video}"
        return re.compile(f"(?P<video>{video})|(?P<image>{image})")

    @property
    def _takes_videos(self) -> bool:
        return getattr(self.processor, "video_pixels", None) is not None

    def prepare_videos(
        self, videos: Sequence[object], *, where: str, folder: Path | None = None
    ) -> list[PreparedImage]:
        """Read and prepare videos; `where` names the column of the row."""
        prepared = []
        for number, value in enumerate(videos):
            place = where if len(videos) == 1 else f"{where}, video {number}"
            if not self._takes_videos:
                raise ValueError(
                    f"{place}: videos are not prepared for {type(self.processor).__name__}, only for models "
                    "of the Qwen2-VL, Qwen2.5-VL and Qwen3-VL families. Store the frames as images."
                )
            prepared.append(self._prepare_video(value, place, folder))
        return prepared

    def _prepare_video(self, value: object, where: str, folder: Path | None) -> PreparedImage:
        import torch

        frames = read_frames(value, self.videos, where=where, folder=folder)
        limits = self._limits()
        processor = self.processor
        patches = cut_into_patches(processor, frames, limits, where)
        text = video_text(processor, patches)
        token = int(processor.video_token_id)
        tensors = {
            "pixel_values": torch.from_numpy(patches.pixels),
            "image_grid_thw": torch.tensor([patches.grid]),
        }
        digest = hashlib.sha256(f"video {patches.grid} {patches.times}".encode())
        digest.update(patches.pixels.tobytes())
        first = frames.images[0]
        pairs = int(processor.image_processor.temporal_patch_size)
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs = ImageInput(
            digest.hexdigest(),
            tensors,
            ids.count(token),
            first.size,
            token,
            picture=first,
            options=limits,
            video=True,
            grid_seconds=pairs * frames.interval,
        )
        return PreparedImage(inputs, text)

    def prepare(
        self, images: Sequence[object], *, where: str, folder: Path | None = None
    ) -> list[PreparedImage]:
        """Read and prepare images; `where` names the column of the row."""
        prepared = []
        for number, value in enumerate(images):
            place = where if len(images) == 1 else f"{where}, image {number}"
            prepared.append(self._prepare(read_image(value, where=place, folder=folder), place))
        return prepared

    def _prepare(self, image: Image, where: str) -> PreparedImage:
        limits = self._limits()
        digest = hashlib.sha256(f"{image.size} {sorted(limits.items())}".encode())
        digest.update(image.tobytes())
        processor = self.processor
        options = dict(processor.valid_processor_kwargs._defaults.get("images_kwargs", {}))
        try:
            made = processor.image_processor(
                [[image]] if _nested(processor) else [image], **options, **limits
            )
        except (ValueError, TypeError) as error:
            size = f"{image.width} x {image.height}"
            raise UnusableImages(f"{where}, {size} pixels, is refused by the processor: {error}") from error
        text = processor.replace_image_token(made, image_idx=0)
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        tensors = {name: _tensor(value) for name, value in made.items() if name not in _UNUSED}
        token = self.token_id
        inputs = ImageInput(
            digest.hexdigest(), tensors, ids.count(token), image.size, token, picture=image, options=limits
        )
        return PreparedImage(inputs, text)

    def _limits(self) -> dict[str, int]:
        """min_pixels and max_pixels as arguments of the processor."""
        if self.min_pixels is None and self.max_pixels is None:
            return {}
        own = self.processor.image_processor
        if "min_pixels" not in own.valid_kwargs.__annotations__:
            raise ValueError(
                f"data.min_pixels={self.min_pixels} and data.max_pixels={self.max_pixels}: "
                f"{type(own).__name__} has no such limits. Take them out."
            )
        smallest = self.min_pixels or int(own.size["shortest_edge"])
        largest = self.max_pixels or int(own.size["longest_edge"])
        if smallest > largest:
            raise ValueError(
                f"Images have at least {smallest} pixels (data.min_pixels={self.min_pixels}) and at most "
                f"{largest} (data.max_pixels={self.max_pixels}). Set both."
            )
        return {"min_pixels": smallest, "max_pixels": largest}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_loaded": None}


def _nested(processor: Any) -> bool:
    """Whether the processor takes a list of images for each of several texts."""
    return "pixel_attention_mask" in processor.image_processor.model_input_names


def _tensor(value: object) -> Tensor:
    import numpy as np
    import torch

    return torch.as_tensor(np.asarray(value))


def counted(kind: str, found: list[ImageInput], rows: int) -> str:
    """How many images or videos there are, how large they are, and their tokens."""
    tokens = [image.num_tokens for image in found]
    width, height = max((image.size for image in found), key=lambda size: size[0] * size[1])
    return (
        f"{len(found)} {kind}s in {rows} rows, largest {width} x {height}, "
        f"{min(tokens)} to {max(tokens)} tokens each"
    )
