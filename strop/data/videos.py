"""Videos of rows: reading their frames, and preparing them for models of the Qwen families.

A video is a list of frames (images, see data/image_files.py), `{"frames": [...], "fps": 2}`, or a video
file: a path, bytes, `{"path": ...}` or `{"bytes": ...}`. The video processors of transformers need
torchvision. Here the frames are resized by PIL and cut into patches by the image processor of the model; a
pair of frames becomes the two halves of one patch, as the model expects it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from strop.data.image_files import UnusableImages, file_content, read_image
from strop.data.video_files import DamagedVideo, decode_frames
from strop.extras import MissingExtra

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_FILE_KEYS = ("bytes", "path", "url")
_FRAME_KEYS = ("frames", "video")
"""`video` as in messages of qwen-vl-utils, a list of frames or a file."""
MOST_ASPECT = 200
"""The models know no frames that are longer than this times their height, or the reverse."""


@dataclass(frozen=True)
class VideoSettings:
    """How videos become frames."""

    fps: float
    """Frames of a second of a video file; those of frame lists that do not say theirs."""
    max_frames: int
    """At most so many frames of a file."""


@dataclass(frozen=True)
class Frames:
    """The frames of a video, in order."""

    images: list[Image]
    times: list[float]
    """When each frame is shown, in seconds."""

    @property
    def interval(self) -> float:
        """Seconds between two frames."""
        if len(self.times) < 2:
            return 1.0
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def read_frames(value: object, settings: VideoSettings, *, where: str, folder: Path | None = None) -> Frames:
    """Return the frames of a video as RGB images of one size. `where` names it in errors."""
    fps = settings.fps
    if isinstance(value, Mapping):
        fps = _fps_of(value, fps, where)
        value = _from_mapping(value, where)
    if not isinstance(value, list | tuple):
        return _from_file(value, settings, where, folder)
    if not value:
        raise UnusableImages(f"{where} has no frames.")
    images = [
        read_image(frame, where=f"{where}, frame {number}", folder=folder)
        for number, frame in enumerate(value)
    ]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])
        raise UnusableImages(f"{where} has frames of different sizes ({shown}); resize them to one.")
    return Frames(images, [number / fps for number in range(len(images))])


def _fps_of(value: Mapping[str, object], default: float, where: str) -> float:
    fps = value.get("fps", default)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise UnusableImages(f"{where} has fps={fps!r}; it must be a positive number.")
    return float(fps)


def _from_mapping(value: Mapping[str, object], where: str) -> object:
    for name in (*_FRAME_KEYS, *_FILE_KEYS):
        if value.get(name) is not None:
            return value[name]
    raise UnusableImages(f"{where} has none of {', '.join((*_FRAME_KEYS, *_FILE_KEYS))}: {sorted(value)}.")


def _from_file(value: object, settings: VideoSettings, where: str, folder: Path | None) -> Frames:
    content = value
    if isinstance(value, str):
        content = file_content(value, where, folder)
    if not isinstance(content, bytes | bytearray):
        raise UnusableImages(
            f"{where} is of the type {type(value).__name__}; a video is a list of frames, a path, bytes, or "
            "{'frames': [...], 'fps': 2}."
        )
    try:
        found = decode_frames(bytes(content), settings.fps, settings.max_frames)
    except MissingExtra as error:
        raise MissingExtra(f"{where} is a video file. {error} Or store its frames as a list.") from error
    except DamagedVideo as error:
        raise UnusableImages(f"{where} cannot be read ({len(content)} bytes): {error}") from error
    return Frames([frame.convert("RGB") for frame in found.frames], found.times)


# --- for the model ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VideoPatches:
    """A video as its model takes it."""

    pixels: np.ndarray
    """[patches, values of a patch]: patches of two neighbouring frames."""
    grid: tuple[int, int, int]
    """Pairs of frames, and patches along height and width."""
    times: list[float]
    """Of each pair of frames, in seconds."""


def cut_into_patches(processor: Any, frames: Frames, limits: Mapping[str, int], where: str) -> VideoPatches:
    """Resize the frames and cut them into patches. `limits` are min_pixels and max_pixels of a frame, where
    they replace those of the processor."""
    import numpy as np
    from PIL import Image

    images: Any = processor.image_processor
    together = int(images.temporal_patch_size)
    pictures = list(frames.images)
    times = list(frames.times)
    while len(pictures) % together:  # the last frame is repeated
        pictures.append(pictures[-1])
        times.append(times[-1])
    width, height = _target_size(processor, frames.images, limits, where)
    resized = [one.resize((width, height), Image.Resampling.BICUBIC) for one in pictures]
    made = images(resized, do_resize=False)
    rows, columns = (int(size) for size in np.asarray(made["image_grid_thw"])[0, 1:])
    values = np.asarray(made["pixel_values"])
    side = int(images.patch_size)
    # An image is cut as a video of equal frames: [frame, patch, channel, copy, height, width].
    cut = values.reshape(len(resized), rows * columns, -1, together, side, side)[:, :, :, 0]
    pairs = cut.reshape(-1, together, *cut.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    grid = (len(resized) // together, rows, columns)
    middle = [(times[i] + times[i + together - 1]) / 2 for i in range(0, len(times), together)]
    return VideoPatches(np.ascontiguousarray(pairs).reshape(math.prod(grid), -1), grid, middle)


def _target_size(
    processor: Any, pictures: Sequence[Image], limits: Mapping[str, int], where: str
) -> tuple[int, int]:
    """Width and height of the resized frames, as the video processor of the family computes them."""
    images: Any = processor.image_processor
    factor = int(images.patch_size) * int(images.merge_size)
    width, height = pictures[0].size
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise UnusableImages(f"{where}: frames of {width} x {height} pixels are too long for the model.")
    smallest, largest = cast("tuple[int, int]", processor.video_pixels)
    count, shown = 1, 1
    if processor.counts_all_frames:  # `shown`: as whole pairs
        count = len(pictures)
        shown = max(round(count / images.temporal_patch_size), 1) * int(images.temporal_patch_size)
    if limits:
        smallest, largest = limits["min_pixels"] * count, limits["max_pixels"] * count
    if processor.counts_all_frames and min(width, height) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rows, columns = (max(round(size / factor), 0) * factor for size in (height, width))
    area = count * height * width
    if shown * rows * columns > largest:
        shrink = math.sqrt(area / largest)
        rows, columns = (max(factor, math.floor(size / shrink / factor) * factor) for size in (height, width))
    elif shown * rows * columns < smallest:
        grow = math.sqrt(smallest / area)
        rows, columns = (math.ceil(size * grow / factor) * factor for size in (height, width))
    return columns, rows


def video_text(processor: Any, patches: VideoPatches) -> str:
    """What replaces the placeholder of a video."""
    times, rows, columns = patches.grid
    token = str(processor.video_token)
    each = rows * columns // int(processor.image_processor.merge_size) ** 2
    if not processor.counts_all_frames:
        return token * (times * each)
    start, end = processor.vision_start_token, processor.vision_end_token
    return "".join(f"<{time:.1f} seconds>{start}{token * each}{end}" for time in patches.times)
