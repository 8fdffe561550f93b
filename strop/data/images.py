"""Images of rows: reading them, and preparing them with the processor of the model.

An image is a path, bytes, `{"bytes": ...}` or `{"path": ...}` (as in parquet files of the datasets library),
a data URL, or a PIL image. The processor resizes and normalises it, and says which text stands for it in the
prompt. It is loaded when the first image is prepared, so runs without images do not import it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from strop.extras import require
from strop.types import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

LoadProcessor = Callable[[], Any]
"""Loads the processor of transformers for a model; ValueError if the model takes no images. It can be
pickled."""
_BYTES_KEYS = ("bytes",)
_PLACE_KEYS = ("path", "image", "url", "image_url")
_UNUSED = ("rows", "cols", "num_crops")
"""What image processors return for their own text, and no model takes."""


class UnusableImages(ValueError):
    """Images of one row that cannot be used. A run masks and counts its samples, and goes on."""


def read_image(value: object, *, where: str, folder: Path | None = None) -> Image:
    """Return an image of a row as RGB. `where` names it in errors; relative paths are looked up in the
    working folder, then in `folder`."""
    pil: Any = require("PIL.Image", extra="vision", why="Images in prompts")
    if isinstance(value, Mapping):
        value = _from_mapping(value, where)
    if isinstance(value, pil.Image):
        return _decoded(cast("Image", value), where)
    if isinstance(value, str):
        value = _from_text(value, where, folder)
    if not isinstance(value, bytes | bytearray):
        raise UnusableImages(
            f"{where} is of the type {type(value).__name__}; an image is a path, bytes, {{'bytes': ...}}, a "
            "data URL or a PIL image."
        )
    try:
        opened = pil.open(io.BytesIO(value))
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as error:
        raise UnusableImages(f"{where} cannot be read ({len(value)} bytes): {error}") from error
    return _decoded(opened, where)


def _decoded(image: Image, where: str) -> Image:
    try:
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UnusableImages(f"{where} is damaged: {error}") from error


def _from_mapping(value: Mapping[str, object], where: str) -> object:
    for name in (*_BYTES_KEYS, *_PLACE_KEYS):
        found = value.get(name)
        if isinstance(found, Mapping):
            found = found.get("url")
        if found is not None:
            return found
    raise UnusableImages(f"{where} has none of {', '.join((*_BYTES_KEYS, *_PLACE_KEYS))}: {sorted(value)}.")


def _from_text(value: str, where: str, folder: Path | None) -> bytes:
    """The bytes behind a path or a data URL."""
    if value.startswith("data:"):
        header, _, content = value.partition(",")
        if not header.endswith(";base64"):
            raise UnusableImages(f"{where} is a data URL without base64 ({header[:60]!r}).")
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise UnusableImages(f"{where} is a data URL with broken base64: {error}") from error
    if value.startswith(("http://", "https://")):
        raise UnusableImages(
            f"{where} is an address ({value[:80]}), which is not fetched; store the image itself."
        )
    path = Path(value.removeprefix("file://")).expanduser()
    if not path.is_file() and folder is not None and (folder / path).is_file():
        path = folder / path
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableImages(f"{where}: the file {str(path)!r} cannot be read: {error.strerror}") from error


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
    _loaded: Any = field(default=None, repr=False)

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
