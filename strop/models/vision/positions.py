"""Positions of tokens on three axes: time, height and width (mrope of the Qwen families).

A token of text has the same number on all axes. Tokens of an image or video have their places in it, counted
from the number that text would have; text behind it begins at the largest number so far, plus one. This is
the rule of the models' authors and of vLLM. get_rope_index of transformers 5 agrees with it for images. For
videos that last longer than they are wide it lets the text behind them begin earlier, and its generate
continues elsewhere than its forward; so positions are computed here, for training and for sampling alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.types import ImageInput, Images


@dataclass(frozen=True)
class AxisRule:
    """What a model says of its positions."""

    token_id: int
    """Of images; other numbered tokens are those of videos."""
    merge: int
    """Patches along a side of a token."""
    tokens_per_second: float | None
    """Numbers on the axis of time in a second of a video; None: one for each pair of frames."""


def three_axes(ids: Tensor, shown: Tensor, images: Images, rule: AxisRule) -> Tensor:
    """[3, L] positions of a sequence of ids; `shown` marks the tokens of `images`."""
    found = []
    start = 0
    end = 0
    for first, last, image in _runs(ids, shown, images, rule):
        found.append(torch.arange(start, start + first - end).expand(3, -1))
        grid = _grid(image, last - first, rule) + start + first - end
        found.append(grid)
        start = int(grid.max()) + 1
        end = last
    found.append(torch.arange(start, start + len(ids) - end).expand(3, -1))
    return torch.cat(found, dim=1)


def _runs(
    ids: Tensor, shown: Tensor, images: Images, rule: AxisRule
) -> Iterator[tuple[int, int, ImageInput]]:
    """First and last + 1 place of each run of tokens, and what it shows. Models that write times into the
    text have a run for each pair of frames of a video."""
    found = []
    for video in (False, True):
        places = (shown & ((ids != rule.token_id) == video)).nonzero().flatten().tolist()
        used = 0
        for image in images:
            if image.video != video or image.unused:
                continue
            own = places[used : used + image.num_tokens]
            used += image.num_tokens
            begin = 0
            for index in range(1, len(own) + 1):
                if index == len(own) or own[index] != own[index - 1] + 1:
                    found.append((own[begin], own[index - 1] + 1, image))
                    begin = index
    yield from sorted(found, key=lambda run: run[0])


def _grid(image: ImageInput, tokens: int, rule: AxisRule) -> Tensor:
    """[3, tokens] places in an image, or in the part of a video that a run shows."""
    _, height, width = (int(size) for size in image.tensors["image_grid_thw"][0])
    rows, columns = height // rule.merge, width // rule.merge
    times = tokens // (rows * columns)
    step = 1.0
    if image.video and rule.tokens_per_second is not None:
        step = rule.tokens_per_second * image.grid_seconds
    time = (torch.arange(times) * step).long()
    axes = torch.meshgrid(time, torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])


def last_seen(shown: Tensor) -> Tensor:
    """The last position that tokens of sequences [..., L] see where images look both ways: the last one of
    its run of tokens that are `shown` for a token in it, and its own for others."""
    length = shown.shape[-1]
    positions = torch.arange(length).expand_as(shown)
    ends = positions.where(~shown, length).flip(-1).cummin(-1).values.flip(-1)
    return positions.where(~shown, ends - 1)
