"""Images and videos as arguments of transformers' own forward and generate: the reference of what passes.py
computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strop.models.vision.passes import joined_tensors, replaced_method, vision_part
from strop.models.vision.positions import three_axes
from strop.types import Images

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def image_arguments(
    model: PreTrainedModel, ids: Sequence[int], images: Images, copies: int
) -> dict[str, Tensor]:
    """Further arguments of transformers' own forward or generate for `copies` rows of one prompt."""
    if not images:
        return {}
    part = vision_part(model)
    weight = next(model.parameters())
    pictures = [image for image in images if not image.video]
    videos = [image for image in images if image.video]
    arguments: dict[str, Tensor] = {}
    if pictures:
        arguments |= joined_tensors(pictures * copies, weight.device, weight.dtype)
    if "pixel_attention_mask" in arguments:  # [rows, crops, ...]
        for name, value in arguments.items():
            arguments[name] = value.unflatten(1, (copies, -1))[0]
    row = torch.tensor([ids])
    types = (row == part.token_id).long()
    if videos:
        joined = joined_tensors(videos * copies, weight.device, weight.dtype)
        arguments["pixel_values_videos"] = joined["pixel_values"]
        arguments["video_grid_thw"] = joined["image_grid_thw"]
        types += 2 * (row == videos[0].token_id)
    types = types.to(weight.device).repeat_interleave(copies, 0)
    if part.has_axes:
        arguments["mm_token_type_ids"] = types
    if part.looks_both_ways:
        arguments["token_type_ids"] = types
    return arguments


@contextmanager
def positions_of_videos(model: PreTrainedModel, ids: Sequence[int], images: Images) -> Iterator[None]:
    """Inside the block the model counts positions of a prompt with videos as training does, see
    positions.py."""
    if not any(image.video for image in images):
        yield
        return
    part = vision_part(model)
    prompt = torch.tensor(ids)
    shown = torch.isin(prompt, torch.tensor([part.token_id, *(image.token_id for image in images)]))
    positions = three_axes(prompt, shown, images, part.axes)[:, None]
    shift = positions.max() + 1 - len(prompt)

    def count(input_ids: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        rows = input_ids.shape[0]
        own = positions.expand(-1, rows, -1).to(input_ids.device)
        return own, shift.expand(rows, 1).to(input_ids.device)

    with replaced_method(part.module, "get_rope_index", count):
        yield
