"""Images of a request for vLLM, whose own processor prepares them: pictures, and a prompt with one token for
each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.extras import require
from strop.rollout.base import Request
from strop.types import ImageInput, Images

if TYPE_CHECKING:
    from PIL.Image import Image

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava")
"""Model types that write an image as one run of placeholder tokens, for which vLLM expects a single one."""
CHANNELS = 3
Facts = dict[str, Any]
"""What a message says of an image besides its pixels."""


def engine_prompt(request: Request) -> dict[str, object]:
    """The prompt of a request as vLLM takes it; ValueError if its images cannot be passed on."""
    if not request.images:
        return {"prompt_token_ids": list(request.ids)}
    if any(image.video for image in request.images):
        raise ValueError("the prompt has a video, which vLLM is not given; set rollout.name=native or hf")
    found: dict[str, object] = {
        "prompt_token_ids": single_placeholders(request.ids, request.images),
        "multi_modal_data": {"image": [picture_of(image) for image in request.images]},
    }
    options = dict(request.images[0].options)
    if options:
        found["mm_processor_kwargs"] = options
    return found


def single_placeholders(ids: Sequence[int], images: Images) -> list[int]:
    """Ids in which the run of placeholder tokens of each image is one token."""
    found: list[int] = []
    place = 0
    for image in images:
        while place < len(ids) and ids[place] != image.token_id:
            found.append(ids[place])
            place += 1
        run = list(ids[place : place + image.num_tokens])
        if run != [image.token_id] * image.num_tokens:
            raise ValueError(
                f"the {image.num_tokens} tokens of an image are not one run in the prompt, so vLLM cannot be "
                "given it; set rollout.name=native or hf"
            )
        found.append(image.token_id)
        place += image.num_tokens
    return [*found, *ids[place:]]


def picture_of(image: ImageInput) -> Image:
    """The picture of an image; ValueError if it was made without one."""
    if image.picture is None:
        raise ValueError("an image has no picture, only tensors; set rollout.name=native or hf")
    return image.picture


# --- messages -----------------------------------------------------------------------------------------------


def pack_images(images: Images) -> tuple[list[Facts], bytes]:
    """Images as facts and pixels."""
    facts = []
    for image in images:
        size = picture_of(image).size
        facts.append(
            {
                "digest": image.digest,
                "tokens": image.num_tokens,
                "token_id": image.token_id,
                "size": list(size),
                "options": dict(image.options),
            }
        )
    return facts, b"".join(picture_of(image).convert("RGB").tobytes() for image in images)


def unpack_images(facts: Sequence[Mapping[str, Any]], pixels: bytes) -> Images:
    """The inverse of `pack_images`; the tensors of the trainer are not sent."""
    pil: Any = require("PIL.Image", extra="vision", why="Images in prompts")
    found = []
    start = 0
    for one in facts:
        width, height = one["size"]
        end = start + width * height * CHANNELS
        picture = pil.frombytes("RGB", (width, height), pixels[start:end])
        found.append(
            ImageInput(
                one["digest"],
                {},
                one["tokens"],
                (width, height),
                one["token_id"],
                picture=picture,
                options=one["options"],
            )
        )
        start = end
    return tuple(found)
