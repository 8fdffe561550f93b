"""Images of samples for the board: small JPEG pictures, each once in a group, so that a file of samples stays
small."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby

import pyarrow as pa

from strop.types import ImageInput, Prompt, Trajectory

MAX_SIDE = 320
"""Pixels of the longer side: about 20 kB each."""
MAX_IMAGES = 8
"""Images of a sample that are kept."""
_QUALITY = 80
IMAGE = pa.struct(
    [
        ("digest", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("video", pa.bool_()),
        ("jpeg", pa.binary()),
    ]
)
"""Size of the picture in the data; `jpeg` is null where an earlier sample of the group has it."""


def image_rows(trajectories: Sequence[Trajectory]) -> Iterator[list[dict[str, object]]]:
    """The first images of each sample; for a video, its first frame."""
    kept: set[tuple[int, str]] = set()
    for trajectory in trajectories:
        row = []
        for image in trajectory.prompt.images[:MAX_IMAGES]:
            key = (trajectory.group, image.digest)
            width, height = image.size
            facts: dict[str, object] = {"digest": image.digest, "width": width, "height": height}
            jpeg = None if key in kept else thumbnail(image)
            row.append({**facts, "video": image.video, "jpeg": jpeg})
            kept.add(key)
        yield row


def thumbnail(image: ImageInput) -> bytes | None:
    """A small JPEG; None if the image was made without a picture."""
    if image.picture is None:
        return None
    small = image.picture.convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()


def readable_ids(prompt: Prompt) -> list[int]:
    """Ids of a prompt in which the placeholder tokens of an image, hundreds of them, are one."""
    placeholders = {image.token_id for image in prompt.images}
    found: list[int] = []
    for token, run in groupby(prompt.ids):
        found += [token] if token in placeholders else list(run)
    return found
