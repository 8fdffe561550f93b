"""Videos: patches, positions and features are those of transformers, in every layout and in the engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.data.chat import Chat
from strop.data.images import ImageProcessor
from strop.models.forward import response_outputs
from strop.models.vision.passes import vision_part
from strop.models.vision.positions import three_axes
from strop.rollout.base import Request
from strop.types import Images
from tests.models.vision.test_passes import Row, batch_of_rows, part
from tests.models.vision.tiny_vlm import picture, processor_of, tiny_vlm, tokenizer_of
from tests.rollout.test_native_images import gap

VIDEO_FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def frames(count: int, width: int = 16, height: int = 16, shade: int = 0) -> list[Any]:
    return [picture((40 * number, shade, 90), width, height) for number in range(count)]


def video_rows(family: str) -> list[Row]:
    """A group of two samples, another rate of frames under the same text, an image behind a video, text."""
    chat = Chat(tokenizer_of(family), images=ImageProcessor(lambda: processor_of(family)))
    one = [{"role": "user", "content": [part("text", "what "), part("video"), part("text", "12+")]}]
    both = [{"role": "user", "content": [part("video"), part("text", "1"), part("image"), part("text", "=")]}]
    slow = {"frames": frames(5, 24), "fps": 0.25}
    cases = (
        (one, [], [frames(4)], 2),
        (one, [], [{"frames": frames(4), "fps": 0.5}], 1),
        (both, [picture()], [slow], 2),
        ([{"role": "user", "content": "12+4="}], [], [], 1),
    )
    found: list[Row] = []
    generator = torch.Generator().manual_seed(0)
    for messages, pictures, videos, samples in cases:
        shown, images = chat.with_images(pictures, videos, where="row 0")
        for _ in range(samples):
            response = torch.randint(8, len(chat.tokenizer), (6,), generator=generator).tolist()
            found.append((shown.ids(messages), images, response))
    return found


def published_positions(types: list[int], images: Images, vision: Any) -> Tensor:
    """The rule of Qwen2.5-VL, token by token; get_rope_index of transformers 5 differs for long videos."""
    rows: list[tuple[int, int, int]] = []
    waiting = {kind: [image for image in images if image.video == (kind == 2)] for kind in (1, 2)}
    while len(rows) < len(types):
        begin = 1 + max((max(row) for row in rows), default=-1)
        kind = types[len(rows)]
        if not kind:
            rows.append((begin, begin, begin))
            continue
        image = waiting[kind].pop(0)
        times, height, width = image.tensors["image_grid_thw"][0].tolist()
        for time in range(times):
            late = int(time * vision.tokens_per_second * image.grid_seconds)
            for row in range(height // vision.spatial_merge_size):
                for column in range(width // vision.spatial_merge_size):
                    rows.append((begin + late, begin + row, begin + column))
    return torch.tensor(rows).T


def transformers_log_probs(model: Any, row: Row) -> Tensor:
    """Log-probs of a response by a plain call of transformers, which gets videos as videos."""
    prompt, images, response = row
    ids = torch.tensor([prompt + response])
    given: dict[str, Tensor] = {}
    types = torch.zeros_like(ids)
    for image in images:
        pixels, grid = (
            ("pixel_values_videos", "video_grid_thw") if image.video else ("pixel_values", "image_grid_thw")
        )
        given[pixels] = image.tensors["pixel_values"]
        given[grid] = image.tensors["image_grid_thw"]
        types[ids == image.token_id] = 1 + image.video
    if images:
        given["mm_token_type_ids"] = types
    if images and hasattr(model.config.vision_config, "tokens_per_second"):
        given["position_ids"] = published_positions(types[0].tolist(), images, model.config.vision_config)[
            :, None
        ]
    logits = model(input_ids=ids, use_cache=False, **given).logits
    own = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return own.gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_layouts_agree_with_transformers(family: str) -> None:
    model = tiny_vlm(family)
    rows = video_rows(family)
    with torch.no_grad():
        expected = torch.stack([transformers_log_probs(model, row) for row in rows])
        batch = batch_of_rows(rows)
        packed = response_outputs(model, batch, ["log_probs"])["log_probs"]
        padded = response_outputs(model, batch, ["log_probs"], packed=False)["log_probs"]
    assert (packed - expected).abs().max() < 1e-5
    assert (padded - expected).abs().max() < 1e-5
    for row in rows:  # as transformers counts them, where it follows the rule
        if family != "qwen2_5_vl" and row[1]:
            assert three_axes_agree(model, row)


def three_axes_agree(model: Any, row: Row) -> bool:
    found = vision_part(model)
    ids = torch.tensor(row[0])
    types = torch.zeros_like(ids)
    grids: dict[str, Tensor] = {}
    for image in row[1]:
        types[ids == image.token_id] = 1 + image.video
        grids["video_grid_thw" if image.video else "image_grid_thw"] = image.tensors["image_grid_thw"]
    wanted, _ = found.module.get_rope_index(ids[None], mm_token_type_ids=types[None], **grids)  # type: ignore[operator]
    return torch.equal(three_axes(ids, types > 0, row[1], found.axes), wanted[:, 0])


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_engines_sample_what_is_recomputed(family: str) -> None:
    model = tiny_vlm(family)
    rows = video_rows(family)
    requests = [Request(rows[i][0], 2, seed=i, images=rows[i][1]) for i in (0, 2, 3, 5)]
    assert gap(model, requests, "native", max_model_len=128) < 1e-5
    assert gap(model, requests, "native", max_model_len=128, max_num_batched_tokens=5) < 1e-5
    assert gap(model, requests[:3], "hf", max_model_len=128) < 1e-5


def test_patches_are_those_of_a_convolution_over_time() -> None:
    """The tower multiplies a patch of two frames with a kernel over both. Here the kernel runs over the whole
    video; three frames, so the last stands twice."""
    processor = processor_of("qwen2_5_vl")
    shown = frames(3, 24, 16)
    [video] = ImageProcessor(lambda: processor).prepare_videos([shown], where="x")
    assert video.inputs.tensors["image_grid_thw"].tolist() == [[2, 4, 6]]
    mean = torch.tensor(processor.image_processor.image_mean)[:, None, None, None]
    std = torch.tensor(processor.image_processor.image_std)[:, None, None, None]
    pixels = torch.stack([torch.from_numpy(np.array(one)) for one in [*shown, shown[-1]]])
    whole = (pixels.permute(3, 0, 1, 2) / 255 - mean) / std
    embed = vision_part(tiny_vlm("qwen2_5_vl")).module.visual.patch_embed
    with torch.no_grad():
        own = embed(video.inputs.tensors["pixel_values"])
        wanted = torch.nn.functional.conv3d(whole[None], embed.proj.weight, stride=(2, 4, 4))[0]
    # [width of the tower, 2, 4, 6]: patches of a token are neighbours, 2 x 2
    wanted = wanted.view(-1, 2, 2, 2, 3, 2).permute(1, 2, 4, 3, 5, 0).flatten(0, 4)
    assert (own - wanted).abs().max() < 1e-5


def test_times_of_frames_reach_the_text_of_qwen3() -> None:
    processor = ImageProcessor(lambda: processor_of("qwen3_vl"))
    [video] = processor.prepare_videos([{"frames": frames(4), "fps": 0.5}], where="x")
    start, end, token = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
    each = f"{start}{token}{end}"  # max_pixels=512 are those of all frames
    assert video.text == f"<1.0 seconds>{each}<5.0 seconds>{each}"
    chat = Chat(tokenizer_of("qwen3_vl"), images=processor)
    shown, _ = chat.with_images([], [frames(4)], where="x")
    text = shown.text([{"role": "user", "content": [part("video")]}])
    assert text == f"<0.2 seconds>{each}<1.2 seconds>{each}", "in place of the marks of the template"
