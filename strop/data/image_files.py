"""Reading images of rows. An image is a path, bytes, `{"bytes": ...}` or `{"path": ...}` (as in parquet files
of the datasets library), a data URL, or a PIL image."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from strop.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

_BYTES_KEYS = ("bytes",)
_PLACE_KEYS = ("path", "image", "url", "image_url")


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
        content = file_content(value, where, folder)
        if not value.startswith("data:"):
            where = f"{where} ({value})"
        value = content
    if not isinstance(value, bytes | bytearray):
        raise UnusableImages(
            f"{where} is of the type {type(value).__name__}; an image is a path, bytes, {{'bytes': ...}}, a "
            "data URL or a PIL image."
        )
    try:
        opened = pil.open(io.BytesIO(value))
    except pil.UnidentifiedImageError as error:  # its own text has the address of an object
        raise UnusableImages(
            f"{where} cannot be read ({len(value)} bytes): it is no image of a known format."
        ) from error
    except Exception as error:  # readers of damaged files raise also SyntaxError, RuntimeError ...
        raise UnusableImages(f"{where} cannot be read ({len(value)} bytes): {error}") from error
    return _decoded(opened, where)


def _decoded(image: Image, where: str) -> Image:
    try:
        return _as_rgb(image)
    except Exception as error:  # as above
        raise UnusableImages(f"{where} is damaged: {error}") from error


def _as_rgb(image: Image) -> Image:
    """Return the image as it is seen on white paper; the colors behind transparent pixels are not meant to be
    seen, and often black."""
    import PIL.Image

    image.load()
    if image.mode.startswith("I;16"):  # `convert` clips it at 255
        import numpy as np

        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    paper = PIL.Image.new("RGB", image.size, "white")
    paper.paste(shown, mask=shown.getchannel("A"))
    return paper


def _from_mapping(value: Mapping[str, object], where: str) -> object:
    for name in (*_BYTES_KEYS, *_PLACE_KEYS):
        found = value.get(name)
        if isinstance(found, Mapping):
            found = found.get("url")
        if found is not None:
            return found
    raise UnusableImages(f"{where} has none of {', '.join((*_BYTES_KEYS, *_PLACE_KEYS))}: {sorted(value)}.")


def file_content(value: str, where: str, folder: Path | None) -> bytes:
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
            f"{where} is an address ({value[:80]}), which is not fetched; store the file itself."
        )
    path = Path(value.removeprefix("file://"))
    try:
        path = path.expanduser()
        if not path.is_file() and folder is not None and (folder / path).is_file():
            path = folder / path
        return path.read_bytes()
    except OSError as error:
        raise UnusableImages(f"{where}: the file {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a zero byte, the home folder of nobody
        raise UnusableImages(f"{where}: {str(path)!r} is no path of a file: {error}") from error
