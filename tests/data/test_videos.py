"""Videos of rows: reading frames, errors that name the row, and what the check counts."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from strop.config.schema.data import DataConfig
from strop.config.schema.supervised import SftDataConfig
from strop.data.chat import Chat
from strop.data.image_files import UnusableImages
from strop.data.images import ImageProcessor
from strop.data.prompts import PromptDataset
from strop.data.report import inspect_files
from strop.data.supervised.datasets import build_supervised
from strop.data.video_files import frame_numbers
from strop.data.videos import VideoSettings, read_frames
from strop.extras import MissingExtra
from tests.data.test_images import url_of
from tests.models.vision.tiny_vlm import picture, processor_of, tokenizer_of

FAMILY = "qwen2_5_vl"
SETTINGS = VideoSettings(fps=2.0, max_frames=8)


def row(*videos: object, prompt: str = "<video>what") -> dict[str, object]:
    return {"data_source": "x", "prompt": [{"role": "user", "content": prompt}], "videos": list(videos)}


def urls(count: int, width: int = 16) -> list[str]:
    return [url_of(picture((50 * number, 0, 90), width)) for number in range(count)]


def test_lists_of_frames_are_read() -> None:
    plain = read_frames(urls(3), SETTINGS, where="x")
    assert plain.times == [0.0, 0.5, 1.0] and plain.interval == 0.5
    named = read_frames({"frames": urls(3), "fps": 4}, SETTINGS, where="x")
    assert named.interval == 0.25
    assert [image.tobytes() for image in named.images] == [image.tobytes() for image in plain.images]
    assert len(read_frames({"video": urls(2)}, SETTINGS, where="x").images) == 2


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "row 3 has no frames"),
        ([*urls(1), *urls(1, 24)], r"different sizes \(16 x 16, 24 x 16\)"),
        ([*urls(1), "missing.png"], "row 3, frame 1: the file 'missing.png' cannot be read"),
        ({"frames": urls(2), "fps": 0}, "fps=0; it must be a positive number"),
        ({"seconds": 3}, "has none of frames, video"),
        (7, "is of the type int"),
        ("https://host/a.mp4", "is an address"),
    ],
)
def test_bad_videos_are_named(value: object, problem: str) -> None:
    with pytest.raises(UnusableImages, match=problem):
        read_frames(value, SETTINGS, where="row 3")


@pytest.mark.skipif(importlib.util.find_spec("av") is not None, reason="the decoder is installed")
def test_a_file_without_a_decoder_is_an_error_of_the_check(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    (tmp_path / "a.mp4").write_bytes(b"not read without a decoder")
    file.write_text("".join(json.dumps(one) + "\n" for one in (row(urls(2)), row("a.mp4"))))
    report = inspect_files(
        str(file), DataConfig(), tokenizer_of(FAMILY), load_processor=partial(processor_of, FAMILY)
    )
    [problem] = [finding.message for finding in report.findings if finding.level == "error"]
    assert "row 1, column 'videos'" in problem and "'av'" in problem and "[video]" in problem
    assert "Or store its frames as a list" in problem


def test_the_check_counts_tokens_of_videos(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    both = {**row(urls(5), prompt="<image>12<video>"), "images": urls(1)}
    file.write_text("".join(json.dumps(one) + "\n" for one in (row(urls(2)), both, row(urls(4, 24)))))
    report = inspect_files(
        str(file), DataConfig(), tokenizer_of(FAMILY), load_processor=partial(processor_of, FAMILY)
    )
    assert report.videos == 3
    assert "1 images in 3 rows, largest 16 x 16, 4 to 4 tokens each" in report.images
    assert "3 videos in 3 rows, largest 24 x 16, 4 to 12 tokens each" in report.images
    assert report.longest == 2 + 4 + 2 + 2 + 12  # an image and three pairs of frames, with their marks


def test_prompts_with_videos() -> None:
    chat = Chat(tokenizer_of(FAMILY), images=ImageProcessor(partial(processor_of, FAMILY)))
    rows = [row(urls(4)), row(prompt="<video>what"), row(urls(4), urls(2)), row(urls(2), prompt="what")]
    prompts = PromptDataset(rows, chat)
    [video] = prompts[0].images
    assert video.video and video.grid_seconds == 1.0 and prompts[0].ids.count(video.token_id) == 8
    for place, problem in (
        (1, "its column 'videos' is empty"),
        (2, "1 <video> placeholders"),
        (3, "0 <video>"),
    ):
        assert problem in prompts[place].unusable
    other = Chat(tokenizer_of("llava"), images=ImageProcessor(partial(processor_of, "llava")))
    with pytest.raises(ValueError, match="videos are not prepared for LlavaProcessor"):
        PromptDataset(rows, other)[0]


def test_frames_are_spread_evenly() -> None:
    assert frame_numbers(100, 10.0, 1.0, 768) == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
    assert frame_numbers(100, 1.0, 1.0, 768) == [0, 33, 66, 99], "at least four"
    assert frame_numbers(100, 50.0, 2.0, 3) == [0, 50, 99]
    assert frame_numbers(1, 0.1, 2.0, 8) == [0]


def test_a_file_is_decoded() -> None:
    av = pytest.importorskip("av")
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        out = container.add_stream("mpeg4", rate=10)
        out.width, out.height, out.pix_fmt = 64, 48, "yuv420p"
        for number in range(30):
            shade = np.full((48, 64, 3), 8 * number, np.uint8)
            for packet in out.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")):
                container.mux(packet)
        for packet in out.encode():
            container.mux(packet)
    frames = read_frames(stream.getvalue(), SETTINGS, where="x")
    assert len(frames.images) == 6 and frames.images[0].size == (64, 48)
    assert np.allclose(frames.times, [0, 0.6, 1.2, 1.7, 2.3, 2.9], atol=0.051)
    shades = [float(np.asarray(image).mean()) for image in frames.images]
    assert np.allclose(shades, [8 * round(29 * place / 5) for place in range(6)], atol=6)
    with pytest.raises(UnusableImages, match="cannot be read"):
        read_frames(b"no video", SETTINGS, where="x")


def test_missing_extra_is_a_value_error() -> None:
    assert issubclass(MissingExtra, ValueError), "the check reports it as a finding"


GRIDS = {
    "qwen2_5_vl": [(3, 4, 6), (1, 2, 12), (4, 8, 2), (3, 2, 2), (2, 4, 6), (2, 4, 6)],
    "qwen3_vl": [(3, 2, 2), (1, 2, 8), (4, 2, 2), (3, 2, 2), (2, 2, 2), (2, 2, 4)],
}
SIZES = [(50, 34, 5), (200, 40, 2), (31, 90, 7), (9, 9, 6), (24, 17, 3), (40, 24, 3)]
"""Width, height and number of frames."""


@pytest.mark.parametrize("family", GRIDS)
def test_sizes_are_those_of_the_video_processors_of_transformers(family: str) -> None:
    """Written down from transformers 5.17 with torchvision, which these tests do without."""
    processor = ImageProcessor(partial(processor_of, family))
    found = []
    for width, height, count in SIZES:
        frames = [picture((40 * number, 0, 90), width, height) for number in range(count)]
        [video] = processor.prepare_videos([frames], where="x")
        found.append(tuple(video.inputs.tensors["image_grid_thw"][0].tolist()))
    assert found == GRIDS[family]


def test_supervised_rows_have_videos(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"prompt": "<video>what", "response": "red", "videos": [urls(4)]}) + "\n")
    config = SftDataConfig(train_files=str(file), prompt_key="prompt", response_key="response")
    dataset = build_supervised(config, tokenizer_of(FAMILY), load_processor=partial(processor_of, FAMILY))
    [video] = dataset[0].images
    assert video.video and dataset[0].ids.count(video.token_id) == 8 and sum(dataset[0].mask) == 2
    other = dataclasses.replace(config, video_fps=0.5)
    [slow] = build_supervised(other, tokenizer_of(FAMILY), load_processor=partial(processor_of, FAMILY))[
        0
    ].images
    assert (video.grid_seconds, slow.grid_seconds) == (1.0, 4.0)
    assert slow.digest != video.digest, "its positions are others"
