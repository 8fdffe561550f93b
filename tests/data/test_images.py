"""Images of rows: every way to store one, what is wrong with bad ones, and prompts that count their tokens."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import pickle
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from strop.config.schema.data import DataConfig
from strop.config.schema.supervised import DpoDataConfig, SftDataConfig
from strop.data.chat import Chat, Rendered
from strop.data.files import open_rows
from strop.data.image_files import UnusableImages, read_image
from strop.data.images import ImageProcessor
from strop.data.prompts import PromptDataset, build_prompts
from strop.data.report import inspect_files
from strop.data.schema import ColumnKeys, parse_row
from strop.data.supervised.datasets import build_supervised
from strop.shared.rendered_batch import rendered_batch
from tests.models.vision.tiny_vlm import picture, processor_of, tokenizer_of

FAMILY = "qwen2_5_vl"


def png(image: Image.Image | None = None) -> bytes:
    stream = io.BytesIO()
    (image or picture()).save(stream, "PNG")
    return stream.getvalue()


def url_of(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def images(**limits: int) -> ImageProcessor:
    return ImageProcessor(partial(processor_of, FAMILY), **limits)


def dataset(rows: list[dict[str, object]], **settings: object) -> PromptDataset:
    return PromptDataset(rows, Chat(tokenizer_of(FAMILY), images=images()), **settings)  # type: ignore[arg-type]


def row(*values: object, prompt: str = "<image>what") -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": prompt}], "images": list(values), "data_source": "x"}


def test_every_way_to_store_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    stored: list[object] = [
        *(str(tmp_path / "a.png"), "a.png", f"file://{tmp_path / 'a.png'}"),
        *(png(), {"bytes": png(), "path": None}, {"path": "a.png"}, {"image": url}),
        *(url, {"image_url": {"url": url}}, picture(), picture().convert("P").convert("RGBA")),
    ]
    expected = picture().tobytes()
    for value in stored[:-1]:
        assert read_image(value, where="here", folder=tmp_path).tobytes() == expected, value
    assert read_image(stored[-1], where="here").mode == "RGB"


@pytest.mark.parametrize(
    "value, problem",
    [
        (b"no image", r"row 3, images cannot be read \(8 bytes\): it is no image of a known format\.$"),
        (png()[:60], "row 3, images is damaged"),
        ("missing.png", "row 3, images: the file 'missing.png' cannot be read"),
        ("https://example.com/a.png", "is an address"),
        ("data:image/png;base64,!!", "broken base64"),
        ("data:text/plain,hello", "without base64"),
        ({"pixels": 1}, "has none of bytes"),
        ("a\0b.png", "is no path of a file"),
        ("~nobody-has-this-name/a.png", "is no path of a file"),
        (7, "of the type int"),
    ],
)
def test_bad_images_are_named(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_image(value, where="row 3, images")


def test_damaged_bytes_of_every_format_are_named() -> None:
    """Pillow raises several kinds of errors, in `open` and later."""
    draw = random.Random(0)
    refused = 0
    Image.init()
    for kind in sorted({"PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF", "QOI"} & set(Image.SAVE)):
        stream = io.BytesIO()
        picture(width=40).save(stream, kind)
        for _ in range(60):
            damaged = bytearray(stream.getvalue())
            for _ in range(4):
                damaged[draw.randrange(60)] = draw.randrange(256)
            try:
                read_image(bytes(damaged[: draw.randrange(20, len(damaged))]), where="row 3, images")
            except UnusableImages as problem:
                assert "row 3, images" in str(problem)
                refused += 1
    assert refused > 200


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_drawings_are_shown_on_white(mode: str) -> None:
    """Black lines on nothing, as many drawings are stored; `convert("RGB")` alone makes them all black."""
    drawing = Image.new("LA", (8, 8), (0, 0))
    drawing.putpixel((3, 3), (0, 255))
    drawing.putpixel((4, 4), (0, 128))
    stream = io.BytesIO()
    drawing.convert("RGBA").convert(mode).save(stream, "PNG")
    for value in (stream.getvalue(), Image.open(stream)):
        shown = read_image(value, where="x")
        assert shown.mode == "RGB"
        assert shown.getpixel((0, 0)) == (255, 255, 255) and shown.getpixel((3, 3)) == (0, 0, 0)
        if mode != "P":
            assert shown.getpixel((4, 4)) == (127, 127, 127)


def test_gray_of_16_bits_keeps_its_shades() -> None:
    """Pillow clips it at 255, so nearly every pixel would be white."""
    scan = Image.new("I;16", (3, 1))
    for place, value in enumerate((0, 0x8000, 0xFFFF)):
        scan.putpixel((place, 0), value)
    shown = read_image(png(scan), where="x")
    assert [shown.getpixel((place, 0)) for place in range(3)] == [(0, 0, 0), (128,) * 3, (255,) * 3]


def test_a_damaged_file_and_a_row_of_json_without_the_column_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png()[:60])
    lacking = row(prompt="<image>what")
    del lacking["images"]
    lines = [row("cut.png"), lacking]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = dataset(open_rows(str(tmp_path / "rows.jsonl")))
    assert "row 0, column 'images' (cut.png) is damaged" in prompts[0].unusable
    assert "row 1: the prompt has <image> but its column 'images' is empty" in prompts[1].unusable


def test_a_row_with_a_damaged_image_has_no_prompt() -> None:
    good, broken, lacking = row(png()), row(png()[:60]), row(prompt="<image>what")
    prompts = dataset([good, broken, lacking])
    assert not prompts[0].unusable
    assert "row 1, column 'images'" in prompts[1].unusable and len(prompts[1].ids) == 1
    assert "row 2" in prompts[2].unusable and prompts[2].data_source == "x"
    assert len(prompts.without_overlong()) == 3


def test_an_enormous_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64)
    with pytest.raises(ValueError, match=r"row 3, images cannot be read .* exceeds limit of 128 pixels"):
        read_image(png(), where="row 3, images")


def test_placeholders_and_images_must_match() -> None:
    for bad in (row(), row(png(), png()), row(png(), prompt="what"), {**row(), "images": None}):
        with pytest.raises(ValueError, match=r"row 0: the prompt has"):
            parse_row(bad, ColumnKeys(), where="row 0")
    text = {"prompt": "<image> is a tag of HTML", "data_source": "x"}
    assert parse_row(text, ColumnKeys(), where="row 0").messages[0]["content"].startswith("<image>")
    with pytest.raises(ValueError, match="has <image> but its column 'images' is empty"):
        parse_row(text, ColumnKeys(), where="row 0", columns=["prompt", "images"])  # other rows have images
    with pytest.raises(ValueError, match="0 <video> placeholders but the row has 1 videos"):
        parse_row({**row(png()), "videos": ["a.mp4"]}, ColumnKeys(), where="row 0")


def test_prompts_have_one_token_per_feature() -> None:
    prompts = dataset([row(png()), row(picture(width=24)), {"prompt": "what", "data_source": "x"}])
    first, second, text = prompts[0], prompts[1], prompts[2]
    assert [image.num_tokens for image in first.images + second.images] == [4, 6]
    assert first.ids.count(4) == 4 and second.ids.count(4) == 6 and 4 not in text.ids
    assert prompts.lengths() == [len(first.ids), len(second.ids), len(text.ids)] == [7, 9, 1]
    assert first.images[0].tensors["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert first.images[0].size == (16, 16) and text.images == ()
    again = pickle.loads(pickle.dumps(prompts))[0]
    assert again.images[0].digest == first.images[0].digest != second.images[0].digest
    assert torch.equal(again.images[0].tensors["pixel_values"], first.images[0].tensors["pixel_values"])


def test_overlong_prompts_count_image_tokens() -> None:
    rows = [row(png()), row(picture(width=24))]
    assert len(dataset(rows, max_prompt_length=8).without_overlong()) == 1
    for mode in ("left", "error"):  # a run goes on: the samples of the row are masked and counted
        prompts = dataset(rows, max_prompt_length=8, truncation=mode)
        assert not prompts[0].unusable
        assert "row 1 has 9 tokens with its images" in prompts[1].unusable and not prompts[1].images


def test_pixel_limits() -> None:
    large = picture(width=64, height=64)
    assert images(max_pixels=256).prepare([large], where="x")[0].inputs.num_tokens == 4
    assert images(max_pixels=2048).prepare([large], where="x")[0].inputs.num_tokens == 25
    assert images(min_pixels=1024, max_pixels=2048).prepare([picture()], where="x")[0].inputs.num_tokens == 16
    with pytest.raises(ValueError, match=r"data.min_pixels=4096"):
        images(min_pixels=4096).prepare([large], where="x")


def test_a_program_without_images_says_so() -> None:
    with pytest.raises(ValueError, match="row 0 holds images or videos, which are not used here"):
        PromptDataset([row(png())], Chat(tokenizer_of(FAMILY)))[0]


def test_files_and_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({**row("a.png"), "pictures": ["a.png"]}) + "\n")
    config = dataclasses.replace(DataConfig(), train_files=str(file), image_key="pictures")
    prompts = build_prompts(config, tokenizer_of(FAMILY), load_processor=partial(processor_of, FAMILY))
    assert prompts[0].images[0].num_tokens == 4


def test_plain_prompts_have_images_too() -> None:
    chat = Chat(tokenizer_of(FAMILY), plain=True, images=images())
    shown, found = chat.with_images([png()], where="x")
    parts = [{"type": "image"}, {"type": "text", "text": "what"}]
    assert shown.ids([{"role": "user", "content": parts}]).count(4) == found[0].num_tokens
    with pytest.raises(ValueError, match="more image placeholders"):
        shown.ids([{"role": "user", "content": [*parts, *parts]}])


def test_supervised_rows_have_images(tmp_path: Path) -> None:
    load = partial(processor_of, FAMILY)
    prompt = [{"role": "user", "content": "<image>what"}]
    rows = [
        {
            "prompt": prompt,
            "response": "red",
            "chosen": "red",
            "rejected": "blue",
            "images": [url_of(picture())],
        }
    ]
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(rows[0]) + "\n")
    sft = SftDataConfig(train_files=str(file), prompt_key="prompt", response_key="response")
    item = build_supervised(sft, tokenizer_of(FAMILY), load_processor=load)[0]
    assert item.ids.count(4) == item.images[0].num_tokens == 4 and sum(item.mask) == 2
    batch = rendered_batch([item, Rendered([5, 6], [0, 1])])
    assert batch.images == [item.images, ()]
    pairs = DpoDataConfig(
        train_files=str(file), prompt_key="prompt", chosen_key="chosen", rejected_key="rejected"
    )
    pair = build_supervised(pairs, tokenizer_of(FAMILY), load_processor=load)[0]
    assert pair.chosen.images is pair.rejected.images and pair.chosen.ids != pair.rejected.ids
    file.write_text(json.dumps({**rows[0], "images": ["nowhere.png"]}) + "\n")
    damaged = build_supervised(sft, tokenizer_of(FAMILY), load_processor=load)
    with pytest.raises(ValueError, match=r"row 0, column 'images': the file 'nowhere.png' cannot be read"):
        damaged.untruncated(0)  # as the preflight reads it
    assert damaged[0] is None, "a run skips and counts it"
    short = dataclasses.replace(sft, max_length=5, truncation="left")
    file.write_text(json.dumps(rows[0]) + "\n")
    cut = build_supervised(short, tokenizer_of(FAMILY), load_processor=load)
    assert cut[0] is None, "images are not cut: the row is skipped and counted"
    assert (
        build_supervised(
            dataclasses.replace(short, truncation="error"), tokenizer_of(FAMILY), load_processor=load
        )[0]
        is None
    )


def test_the_report_counts_images_and_names_bad_ones(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [row(url_of(picture())), row(url_of(picture(width=24))), {"prompt": "what", "data_source": "x"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = DataConfig(train_files=str(file))
    load = partial(processor_of, FAMILY)
    found = inspect_files(str(file), config, tokenizer_of(FAMILY), load_processor=load)
    assert found.images == "2 images in 2 rows, largest 24 x 16, 4 to 6 tokens each"
    assert found.longest == 9 and found.ok
    file.write_text("".join(json.dumps(one) + "\n" for one in [*rows, row("data:image/png;base64,AAAA")]))
    found = inspect_files(str(file), config, tokenizer_of(FAMILY), load_processor=load)
    [problem] = [finding.message for finding in found.findings if finding.level == "error"]
    assert "row 3, column 'images' cannot be read (3 bytes)" in problem
