"""Images of prompts in the engine: how the prefix cache distinguishes them, their positions, and prefill
passes with their features. Decode steps see text only: positions after an image are shifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from strop.models.packing import Inputs
from strop.models.vision.feature_cache import FeatureCache
from strop.models.vision.passes import (
    FIRST,
    VisionPart,
    axis_positions,
    find_vision_part,
    images_in,
    number_image_tokens,
    other_masks,
    vision_part,
)
from strop.models.vision.positions import last_seen
from strop.rollout.base import Request
from strop.types import ImageInput, Images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIRST_KEY = 1 << 62
_KEY_DIGITS = 11
_KEY_BITS = 17
"""A key has 44 bits of the picture and 17 of the token's place in it."""


class Chunk(Protocol):
    """Tokens `start ..` of a sequence."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]: ...


class PrefillStep(Protocol):
    """Chunks in one packed row."""

    ids: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt; its samples share them."""

    images: Images
    prompt: Tensor
    keys: list[int]
    """The prompt, in which tokens of different images have different keys."""
    end: int
    """The position behind the last image token."""
    positions: Tensor | None
    """[3, tokens of the prompt]; None: one axis, counted by tokens."""
    shift: int
    """Of the positions behind the prompt, against counting tokens."""
    reach: Tensor | None = None
    """[tokens of the prompt] the last position that each sees; None: its own."""

    def reach_of(self, start: int, end: int) -> Tensor | None:
        """The last positions that the tokens `start .. end` of a sequence see; None: their own."""
        if self.reach is None or start >= self.end:
            return None
        own = self.reach[start:end]
        return torch.cat([own, torch.arange(start + len(own), end)])


def image_problem(model: nn.Module, request: Request) -> str | None:
    """Why the images of a request cannot be used, or None."""
    if not request.images:
        return None
    if request.adapter is not None:
        return f"the request has images and names the adapter {request.adapter!r}; it can have one of them"
    part = find_vision_part(model)
    if part is None:
        return f"the prompt has images and {type(model).__name__} takes none"
    if part.masks_by_other_rules:
        return other_masks(model)
    for video in (False, True):
        own = [image for image in request.images if image.video == video]
        token = own[0].token_id if own and video else part.token_id
        found = list(request.ids).count(token)
        wanted = sum(image.num_tokens for image in own)
        if found < wanted:
            kind = "video" if video else "image"
            return f"the prompt has {found} {kind} tokens and its {kind}s have {wanted}"
    return None


def prompt_images(model: nn.Module, prompt: Sequence[int], images: Images) -> PromptImages | None:
    """What the engine needs for the images of a prompt; None if there are none."""
    if not images:
        return None
    part = vision_part(model)
    ids = torch.tensor(prompt)
    known: dict[str, tuple[int, ImageInput]] = {}
    keyed = number_image_tokens(ids, images, part.token_id, known)
    places = (keyed >= FIRST).nonzero().flatten()
    numbers = {}
    for first, image in known.values():
        base = _FIRST_KEY + (int(image.digest[:_KEY_DIGITS], 16) << _KEY_BITS)
        for place in range(image.num_tokens):
            numbers[FIRST + first + place] = base + place
    keys = [numbers.get(number, number) for number in keyed.tolist()]
    positions = None
    shift = 0
    if part.has_axes:
        positions = axis_positions(part, ids, keyed, images, {})
        shift = int(positions.max()) + 1 - len(prompt)
    reach = last_seen(keyed >= FIRST) if part.looks_both_ways else None
    return PromptImages(images, ids, keys, int(places[-1]) + 1, positions, shift, reach)


class ImagePrefill:
    """Runs prefill passes, with the features of the images in them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = FeatureCache()
        self.stale = False
        """The weights have changed, and with them the features of every image. Optimizers that write to
        `.data` leave no trace at the parameters, so the engine sets it."""

    def prefill(
        self,
        forward: Callable[..., Tensor],
        step: PrefillStep,
        chunks: Sequence[Chunk],
        images: Sequence[PromptImages | None],
        more: Mapping[str, Tensor],
    ) -> Tensor:
        """Logits of a pass over the chunks in one row; `images` are those of the prompt of each."""
        part = vision_part(self._model)
        known: dict[str, tuple[int, ImageInput]] = {}
        ids = torch.cat([_numbered(part, *pair, known) for pair in zip(chunks, images, strict=True)])
        positions = step.positions[None]
        if part.has_axes:
            columns = [_positions(*pair) for pair in zip(chunks, images, strict=True)]
            positions = torch.cat(columns, dim=1)[:, None].to(step.ids.device)
        if self.stale:
            self._cache.clear()
            self.stale = False
        used = tuple(image for _, image in known.values())
        row = Inputs(ids[None].to(step.ids.device), positions, None, None, positions, used)
        with images_in(self._model, row, self._cache) as (plain_ids, arguments):
            return forward(plain_ids, positions, step, **more, **arguments)


def _numbered(
    part: VisionPart, chunk: Chunk, images: PromptImages | None, known: dict[str, tuple[int, ImageInput]]
) -> Tensor:
    """The ids of a chunk, with numbered image tokens if it has any."""
    tokens = torch.tensor(chunk.tokens)
    if images is None or chunk.start >= images.end:
        return tokens
    whole = number_image_tokens(images.prompt, images.images, part.token_id, known)
    return torch.cat([whole[chunk.start : chunk.end], tokens[max(0, len(whole) - chunk.start) :]])


def _positions(chunk: Chunk, images: PromptImages | None) -> Tensor:
    """[3, tokens] positions of a chunk."""
    counted = torch.arange(chunk.start, chunk.end)
    if images is None or images.positions is None:
        return counted.expand(3, -1)
    later = counted[counted >= len(images.prompt)] + images.shift
    return torch.cat([images.positions[:, chunk.start : chunk.end], later.expand(3, -1)], dim=1)
